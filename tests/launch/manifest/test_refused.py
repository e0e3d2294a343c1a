"""Wrong jobs are refused with one message that has the value, the rule and the remedy, and with exit code 2."""

from __future__ import annotations

import shlex

import pytest
from tests.launch.manifest.cases import COMMON, ELASTIC, LOCAL, PATHWAYS, PLACE

from trainer.launch.manifest.__main__ import main

GRAIN = "dataset_path= dataset_type=grain grain_file_type=parquet"
PARQUET = f"{GRAIN} grain_train_files=gs://my-bucket/data"
WRONG = {
  "every slice may be lost": (f"jobset {COMMON} {ELASTIC} --elastic-slices 3", "--elastic-slices 3: of --num-slices 3"),
  "only the launcher is elastic": (f"jobset {COMMON} {PATHWAYS} --elastic-slices 1", "elastic_enabled=false"),
  "minimum below what Pathways allows": (
    f"jobset {COMMON} {ELASTIC} --elastic-slices 1 elastic_min_slice_count=1",
    "Give elastic_min_slice_count=2, or more --elastic-slices",
  ),
  "fewer restarts than retries": (
    f"gcluster {COMMON} {ELASTIC} --elastic-slices 1 --max-slice-restarts 2",
    "elastic_max_retries=10 allows 9 recoveries",
  ),
  "a save that xpk's head cannot finish": (
    f"xpk {COMMON} {PATHWAYS} {PLACE} --step-seconds 20",
    "the Pathways head of xpk has 30 s",
  ),
  "a grace period above the pods'": (f"jobset {COMMON} autocheckpoint_grace_seconds=60", "the pods will have 30 s"),
  "restarts without checkpoints": (
    f"jobset {COMMON} enable_checkpointing=false --max-restarts 3",
    "a restarted run begins at step 0",
  ),
  "slices differ": (f"jobset {COMMON} num_slices=2", "num_slices=2: differs from --num-slices 3"),
  "a local output folder": (f"jobset {COMMON} base_output_directory=runs", "must be in Cloud Storage"),
  "a name with an underscore": (f"jobset {COMMON} run_name=my_run", "--workload my_run: a name for jobset"),
  "a name that xpk lacks": (f"xpk {COMMON} {PLACE} --tpu-type v5e-16", "xpk has no such name"),
  "a PathwaysJob without Pathways": (f"pathwaysjob {COMMON}", "Set enable_single_controller=true"),
  "a service that the image lacks": (f"jobset {COMMON} services=wandb", "services=wandb: needs the extra wandb"),
  "a local dataset": (f"jobset {COMMON} dataset_path=texts", "dataset_path=texts: no pod has this path"),
  "no dataset": (f"jobset {COMMON} dataset_path=", "would train on Python's standard library"),
  "ArrayRecord in a bucket": (
    f"jobset {COMMON} {PARQUET} grain_file_type=arrayrecord",
    "the reader of this format opens only files of its machine",
  ),
  "a mixture outside the image": (
    f"jobset {COMMON} {GRAIN} grain_train_mixture_config_path=tests/../configs/data/mixture_sources.yml",
    "mixture_sources.yml: the container does not have this file",
  ),
  "a model that a slice cannot hold": (
    f"jobset {COMMON} model_name=llama3.1-405b --tpu-type v5litepod-4",
    "need 4,536 GiB, and a slice of 4 chips has 64 GiB",
  ),
  "a ramdisk that a host cannot hold": (
    f"jobset {COMMON} {LOCAL} model_name=llama3-70b --tpu-type v5p-32",
    "ct5p-hightpu-4t has 448 GB of memory",
  ),
  "a bucket that was not filled in": (
    f"jobset {COMMON} base_output_directory=gs://BUCKET/runs",
    "'BUCKET' is not a bucket name",
  ),
  "a stand-in for Pathways": (
    f"jobset {COMMON} {PATHWAYS} cluster=pathways cluster_standin=3x16",
    "cluster_standin=3x16: is a stand-in for Pathways",
  ),
  "an account that is a command": (f"gcluster {COMMON} --service-account 'x;id'", "--service-account 'x;id'"),
  "a simulated cluster": (f"jobset {COMMON} cluster=simulated", "the job on GKE needs cluster=auto"),
  "local copies behind gcluster's Pathways": (f"gcluster {COMMON} {PATHWAYS} {LOCAL}", "ramdisks on TPU hosts only"),
  "a ramdisk that nothing uses": (f"jobset {COMMON} --ramdisk csi", "nothing would use it"),
  "a cache volume in xpk": (f"xpk {COMMON} {PLACE} --cache-volume compiled", "Set jax_cache_dir=gs://"),
  "xpk without a place": (f"xpk {COMMON} --cluster my-cluster --project my-project", "xpk needs the zone"),
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
