"""Wrong jobs are refused with one message that has the value, the rule and the remedy, and with exit code 2."""

from __future__ import annotations

import shlex

import pytest
from tests.launch.manifest.cases import COMMON, ELASTIC, IMAGE, LOCAL, PATHWAYS, PLACE, RUN, V5E

from trainer.launch.manifest.__main__ import main

GRAIN = "dataset_path= dataset_type=grain grain_file_type=parquet"
PARQUET = f"{GRAIN} grain_train_files=gs://my-bucket/data"
WRONG = {
  "every slice may be lost": (f"jobset {COMMON} {ELASTIC} --elastic-slices 3", "--elastic-slices 3: of --num-slices 3"),
  "only the launcher is elastic": (f"jobset {COMMON} {PATHWAYS} --elastic-slices 1", "elastic_enabled=false"),
  "only the program is elastic": (f"xpk {COMMON} {ELASTIC} {PLACE}", "--elastic-slices 0, elastic_enabled=true"),
  "elastic without Pathways": (f"jobset {COMMON} elastic_enabled=true", "Set enable_single_controller=true"),
  "minimum below what Pathways allows": (
    f"jobset {COMMON} {ELASTIC} --elastic-slices 1 elastic_min_slice_count=1",
    "Give elastic_min_slice_count=2, or more --elastic-slices",
  ),
  "minimum above the slices": (
    f"jobset {COMMON} {ELASTIC} --elastic-slices 1 elastic_min_slice_count=4",
    "elastic_min_slice_count=4: the job has --num-slices 3",
  ),
  "fewer restarts than retries": (
    f"gcluster {COMMON} {ELASTIC} --elastic-slices 1 --max-slice-restarts 2",
    "elastic_max_retries=10 allows 9 recoveries",
  ),
  "a save that gcluster's head cannot finish": (
    f"gcluster {COMMON} {PATHWAYS} --save-gigabytes-per-second 0.2",
    "the Pathways head of gcluster has 30 s",
  ),
  "a save that xpk's head cannot finish": (
    f"xpk {COMMON} {PATHWAYS} {PLACE} --step-seconds 20",
    "the Pathways head of xpk has 30 s",
  ),
  "a grace period above the pods'": (f"jobset {COMMON} autocheckpoint_grace_seconds=60", "the pods will have 30 s"),
  "restarts that xpk ignores": (f"xpk {COMMON} {PATHWAYS} {PLACE} --max-restarts 3", "xpk ignores it behind Pathways"),
  "restarts without checkpoints": (
    f"jobset {COMMON} enable_checkpointing=false --max-restarts 3",
    "a restarted run begins at step 0",
  ),
  "slices differ": (f"jobset {COMMON} num_slices=2", "num_slices=2: differs from --num-slices 3"),
  "a local output folder": (f"jobset {COMMON} base_output_directory=runs", "must be in Cloud Storage"),
  "a long name behind Pathways": (f"jobset {COMMON} {PATHWAYS} --workload {'n' * 23}", "at most 22 characters"),
  "a name with an underscore": (f"jobset {COMMON} run_name=my_run", "--workload my_run: a name for jobset"),
  "no such slice": (
    f"jobset {RUN} {IMAGE} --tpu-type v5litepod-12",
    "the number counts chips",
  ),
  "a GPU": (f"jobset {RUN} {IMAGE} --tpu-type h100-8", "h100-8: is no TPU"),
  "less than a host": (f"jobset {RUN} {IMAGE} --tpu-type v5litepod-1", "has 1 chip"),
  "a name that xpk lacks": (f"xpk {COMMON} {PLACE} --tpu-type v5e-16", "xpk has no such name"),
  "a machine that a PathwaysJob lacks": (
    f"pathwaysjob {COMMON} {PATHWAYS} --tpu-type tpu7x-128 --save-gigabytes-per-second 9",
    "cannot have this machine type",
  ),
  "a version of Pathways without Pathways": (
    f"jobset {COMMON} --pathways-version v1",
    "has no effect without Pathways",
  ),
  "a PathwaysJob without Pathways": (f"pathwaysjob {COMMON}", "Set enable_single_controller=true"),
  "a service that the image lacks": (f"jobset {COMMON} services=wandb", "services=wandb: needs the extra wandb"),
  "another service, and an image with the first": (
    f"xpk {COMMON} {PLACE} services=goodput --image-extras wandb",
    "services=goodput: needs the extra goodput",
  ),
  "an extra that does not exist": (
    f"jobset {COMMON} --image-extras wnb",
    "'wnb' must be one of goodput, ray, tfds",
  ),
  "a local dataset": (f"jobset {COMMON} dataset_path=texts", "dataset_path=texts: no pod has this path"),
  "a local dataset for evaluation": (
    f"gcluster {COMMON} eval_dataset_path=/data/held_out",
    "eval_dataset_path=/data/held_out: no pod has this path",
  ),
  "a local tokenizer": (
    f"jobset {COMMON} tokenizer_type=bpe tokenizer_path=qwen/tokenizer.json",
    "tokenizer_path=qwen/tokenizer.json: no pod",
  ),
  "a dataset below /cache without a volume": (f"jobset {COMMON} dataset_path=/cache/texts", "no pod has this path"),
  "no dataset": (f"jobset {COMMON} dataset_path=", "would train on Python's standard library"),
  "no dataset for grain": (f"jobset {COMMON} {GRAIN}", "dataset_type=grain has no data"),
  "one local file of several": (
    f"jobset {COMMON} {GRAIN} 'grain_train_files=gs://my-bucket/a;b.parquet'",
    "grain_train_files=b.parquet: no pod has this path",
  ),
  "ArrayRecord in a bucket": (
    f"jobset {COMMON} {PARQUET} grain_file_type=arrayrecord",
    "the reader of this format opens only files of its machine",
  ),
  "a dataset of Hugging Face": (
    f"jobset {COMMON} dataset_type=hf dataset_path=saved",
    "dataset_path=saved: no pod has",
  ),
  "a store for which the image has no package": (
    f"jobset {COMMON} dataset_path=s3://my-bucket/texts",
    "the image reads only gs://",
  ),
  "a mixture outside the image": (
    f"jobset {COMMON} {GRAIN} grain_train_mixture_config_path=tests/../configs/data/mixture_sources.yml",
    "mixture_sources.yml: the container does not have this file",
  ),
  "a mixture of local files": (
    f"jobset {COMMON} {GRAIN} grain_train_mixture_config_path=configs/data/mixture_sources.yml",
    "grain_train_files=my_data/*.jsonl: no pod has this path",
  ),
  "a model's file outside the image": (
    f"jobset {COMMON} model_name=./src/trainer/configs/models/qwen3-8b.yml --tpu-type v5p-128",
    "qwen3-8b.yml: the container does not have this file",
  ),
  "a config file that the image lacks": (
    f"jobset {COMMON}".replace("configs/b", "docs/../configs/b"),
    "does not have this",
  ),
  "a model that a slice cannot hold": (
    f"jobset {COMMON} model_name=llama3.1-405b --tpu-type v5litepod-4",
    "need 4,536 GiB, and a slice of 4 chips has 64 GiB",
  ),
  "a model that half of its chips could not hold": (
    f"jobset {COMMON} model_name=llama3.1-8b --tpu-type v5litepod-4",
    "Choose a slice of more than 6 chips",
  ),
  "a ramdisk that a host cannot hold": (
    f"jobset {COMMON} {LOCAL} model_name=llama3-70b --tpu-type v5p-32",
    "ct5p-hightpu-4t has 448 GB of memory",
  ),
  "a bucket with a short name": (
    f"jobset {COMMON} base_output_directory=gs://b/o",
    "base_output_directory=gs://b/o: 'b' is not a bucket name: it has 3 or more",
  ),
  "a bucket that was not filled in": (
    f"jobset {COMMON} base_output_directory=gs://BUCKET/runs",
    "'BUCKET' is not a bucket name",
  ),
  "a dataset in a bucket that was not filled in": (
    f"jobset {COMMON} dataset_path=gs://BUCKET/texts",
    "dataset_path=gs://BUCKET/texts: 'BUCKET' is not a bucket name",
  ),
  "a stand-in for Pathways": (
    f"jobset {COMMON} {PATHWAYS} cluster=pathways cluster_standin=3x16",
    "cluster_standin=3x16: is a stand-in for Pathways",
  ),
  "an empty name": (f"jobset {COMMON} --workload ''", "--workload '': is not a name"),
  "a queue with a space": (f"jobset {COMMON} --queue 'a b'", "--queue 'a b': is not a name"),
  "an account that is a command": (f"gcluster {COMMON} --service-account 'x;id'", "--service-account 'x;id'"),
  "a cluster with a space": (f"xpk {COMMON} --cluster 'a b' --project p --zone z", "--cluster 'a b': is not a name"),
  "a zone that is a command": (f"xpk {COMMON} --cluster a --project p --zone '$(id)'", "--zone '$(id)': is not a name"),
  "a tag with a space": (f"pathwaysjob {COMMON} {PATHWAYS} --pathways-version 'a b'", "--pathways-version 'a b'"),
  "a simulated cluster": (
    f"jobset {COMMON} cluster=simulated",
    "the job on GKE needs cluster=auto",
  ),
  "local copies behind gcluster's Pathways": (f"gcluster {COMMON} {PATHWAYS} {LOCAL}", "ramdisks on TPU hosts only"),
  "a ramdisk that nothing uses": (f"jobset {COMMON} --ramdisk csi", "nothing would use it"),
  "a relative ramdisk": (f"jobset {COMMON} {LOCAL} local_checkpoint_directory=local", "must begin with /"),
  "a cache volume in xpk": (f"xpk {COMMON} {PLACE} --cache-volume compiled", "Set jax_cache_dir=gs://"),
  "two caches": (f"jobset {COMMON} --cache-volume compiled jax_cache_dir=gs://my-bucket/jax", "Remove one of them"),
  "xpk without a place": (f"xpk {COMMON} --cluster my-cluster --project my-project", "xpk needs the zone"),
  "no image": (f"jobset {RUN} {V5E}", "required: --image"),
  "an unknown option": (f"jobset {COMMON} --elastic-slice 1", "unrecognized arguments: --elastic-slice"),
  "a number that is none": (f"jobset {COMMON} --elastic-slices two", "two must be a whole number of at least 0"),
  "a wrong key": (f"jobset {COMMON} stepz=5", "Did you mean steps?"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_job_is_refused(name, capsys):
  arguments, message = WRONG[name]
  assert main(shlex.split(arguments)) == 2
  printed = capsys.readouterr()
  assert printed.out == ""
  assert message in printed.err and "mistakes" not in printed.err
  assert printed.err.startswith("error: ") and len(printed.err.splitlines()) in (2, 3)


def test_independent_mistakes_are_reported_together(capsys):
  assert main(f"jobset {COMMON} run_name=my_run base_output_directory=runs num_slices=2".split()) == 2
  assert capsys.readouterr().err.startswith("error: 3 mistakes in the configuration:")
