"""What the pods contain, and the run needs: packages, data, memory. Like job_checks.py: one message per broken rule."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from input_pipeline import remote
from input_pipeline.options import DataOptions
from input_pipeline.storage import is_address
from trainer.config import config_files, counts, mixture_files, paths
from trainer.config.errors import shorten
from trainer.config.schema import Config
from trainer.launch.manifest import budget, job_checks
from trainer.launch.manifest.gke_plan import CACHE_FOLDER, GkePlan

# The keys that name training data and evaluation data, by dataset_type.
_DATA_KEYS = {
  "text": ("dataset_path", "eval_dataset_path"),
  "grain": ("grain_train_files", "grain_eval_files"),
  "tfds": ("dataset_path",),
  "hf": ("dataset_path",),
}
_REMOTE_GRAIN = ("parquet", "jsonl")  # values of grain_file_type whose files may have addresses
_GIB = 2**30


def problems(plan: GkePlan) -> Iterator[str]:
  for rule in (_packages, _data, _buckets, _device_memory, _host_memory):
    yield from rule(plan)


def _packages(plan: GkePlan) -> Iterator[str]:
  needs = {given: extra for given, _, extra in paths.extras(plan.config.observe)}
  needs |= {
    f"dataset_type={data.dataset_type}": "tfds" for data in _sections(plan.config) if data.dataset_type == "tfds"
  }
  for what, extra in needs.items():
    if extra not in plan.options.image_extras:
      yield (
        f"{what}: needs the extra {extra}, which the image of docker/Dockerfile does not have.\n"
        f"Build --image with --build-arg EXTRAS={extra} and give --image-extras {extra}, or remove {what}."
      )


def _sections(config: Config) -> Iterator[DataOptions]:
  """The data keys of the run, or of each source of its mixture, and of each evaluation set."""
  data = config.data
  if data.dataset_type == "synthetic":
    return
  yield from [entry.options for entry in mixture_files.read(data)] or [data]
  yield from mixture_files.read_eval_sets(data).values()


def _data(plan: GkePlan) -> Iterator[str]:
  """Pods have the files of the package, the volume of --cache-volume, and what is in a bucket."""
  data = plan.config.data
  if data.dataset_type == "synthetic":
    return
  for key in ("grain_train_mixture_config_path", "eval_sets"):
    value = getattr(data, key)
    if value and not config_files.is_in_package(value):
      yield f"{key}={value}: {job_checks.ONLY_PACKAGED}"
      return  # its sources are unknown
  for section in _sections(plan.config):
    yield from _paths(plan, section)
  if data.tokenizer_type == "bpe" and data.tokenizer_path:
    yield from _path(plan, "tokenizer_path", data.tokenizer_path, True)


def _paths(plan: GkePlan, data: DataOptions) -> Iterator[str]:
  """The data of one section: training data are there, and all data are where pods can read them."""
  kind = data.dataset_type
  required, *others = _DATA_KEYS[kind]
  if data is plan.config.data and not getattr(data, required) and not data.grain_dataset:
    library = ", and would train on Python's standard library" if kind == "text" else ""
    yield (
      f"{required}=: dataset_type={kind} has no data{library}.\n"
      f"Give {required}=gs://BUCKET/FOLDER, or dataset_type=synthetic for random tokens."
    )
  remote = kind == "text" or (kind == "grain" and data.grain_file_type in _REMOTE_GRAIN)
  for key in (required, *others):
    for part in getattr(data, key).split(";") if kind == "grain" else [getattr(data, key)]:
      if part.strip():
        yield from _path(plan, key, part.strip(), remote)


def _path(plan: GkePlan, key: str, value: str, remote: bool) -> Iterator[str]:
  """remote: whether the reader of this file takes addresses."""
  mounted = plan.options.cache_volume and value.startswith(f"{CACHE_FOLDER}/")
  if mounted or (remote and value.startswith("gs://")):
    return
  address = "an address gs://BUCKET/FOLDER, or " if remote else ""
  wrong = "the reader of this format opens only files of its machine" if is_address(value) else "no pod has this path"
  wrong = "the image reads only gs://" if remote and is_address(value) else wrong
  yield f"{key}={shorten(value)}: {wrong}.\nGive {address}a folder below {CACHE_FOLDER} of --cache-volume gs://BUCKET."


def _buckets(plan: GkePlan) -> Iterator[str]:
  """Addresses that name a bucket which cannot exist, such as gs://BUCKET/runs."""
  data = plan.config.data
  given = {"base_output_directory=": plan.config.run.base_output_directory}
  given["--pathways-gcs-location "] = plan.options.pathways_gcs_location or ""
  given["jax_cache_dir="] = plan.config.run.jax_cache_dir
  if data.dataset_type != "synthetic":
    given |= {f"{key}=": getattr(data, key) for key in (*_DATA_KEYS.get(data.dataset_type, ()), "tokenizer_path")}
  for name, value in given.items():
    for part in re.findall(r"gs://[^;]*", value):
      yield from remote.bucket_problems(f"{name}{shorten(part)}", part)


def _device_memory(plan: GkePlan) -> Iterator[str]:
  """Every slice holds the whole state, spread over its chips. What else a step needs, trainer.tools.preflight knows."""
  chips, needed = plan.slice.hosts * plan.slice.chips_per_host, budget.state_bytes(plan.config)
  if needed > chips * plan.slice.hbm_bytes:
    yield (
      f"--tpu-type {plan.options.tpu_type}: the parameters and the optimizer state of {plan.config.model.model_name} "
      f"({counts.parameter_count(plan.config.model) / 1e9:.2f} billion parameters) need {needed / _GIB:,.0f} GiB, and "
      f"a slice of {chips} chips has {chips * plan.slice.hbm_bytes / _GIB:,.0f} GiB.\nChoose a slice of more than "
      f"{math.ceil(needed / plan.slice.hbm_bytes)} chips of this kind, or a smaller model."
    )


def _host_memory(plan: GkePlan) -> Iterator[str]:
  """Behind Pathways the ramdisk is on a CPU node, whose memory is unknown here."""
  if not plan.pathways and plan.ramdisk_mebibytes * budget.MEBIBYTE > plan.slice.host_bytes:
    yield (
      f"enable_emergency_checkpoint=true: the ramdisk needs {plan.ramdisk_mebibytes * budget.MEBIBYTE / 1e9:,.0f} GB "
      f"per host, and {plan.slice.machine_type} has {plan.slice.host_bytes / 1e9:,.0f} GB of memory.\n"
      "Choose a slice with more hosts, or set enable_emergency_checkpoint=false."
    )
