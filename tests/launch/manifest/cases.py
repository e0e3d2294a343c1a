"""Arguments of the command for the tests: parts that many configurations share."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.launch.manifest import __main__ as manifest

IMAGE = "--image gcr.io/my-project/trainer"
PLACE = "--cluster my-cluster --project my-project --zone us-central1"
RUN = (
  "configs/base.yml base_output_directory=gs://my-bucket/runs run_name=first model_name=qwen3-0.6b "
  "dataset_type=text dataset_path=gs://my-bucket/texts"
)
PATHWAYS = "enable_single_controller=true"
ELASTIC = f"{PATHWAYS} elastic_enabled=true"
LOCAL = "enable_emergency_checkpoint=true local_checkpoint_directory=/local local_checkpoint_period=10"
GRAIN = "dataset_path= dataset_type=grain"
V5E = "--tpu-type v5litepod-16 --num-slices 3"
COMMON = f"{RUN} {IMAGE} {V5E}"

# Jobs of all kinds that can run. The first word is the target.
VALID = (
  f"jobset {COMMON} {ELASTIC} --elastic-slices 1 {PLACE}",
  f"jobset {COMMON} {ELASTIC} {LOCAL} --elastic-slices 2 elastic_min_slice_count=1 --cache-volume compiled --queue q",
  f"jobset {COMMON} {LOCAL} --max-restarts 50 --save-gigabytes-per-second 0.25 --service-account writer",
  f"jobset {COMMON} {LOCAL} --ramdisk emptydir --cache-volume gs://my-compiled",
  f"jobset {RUN} {IMAGE} --tpu-type v6e-256 model_name=llama3.1-8b {PATHWAYS} --save-gigabytes-per-second 0.5",
  f"jobset {RUN} {IMAGE} --tpu-type v5p-128 --num-slices 2 model_name=llama3-70b jax_cache_dir=gs://my-bucket/jax",
  f"pathwaysjob {COMMON} {ELASTIC} --elastic-slices 1 --max-restarts 3 --pathways-version v1",
  f"pathwaysjob {RUN} {IMAGE} --tpu-type v4-64 {PATHWAYS} enable_checkpointing=false --cache-volume gs://my-compiled",
  f"xpk {COMMON} {ELASTIC} {PLACE} --elastic-slices 1 --pathways-gcs-location gs://my-bucket/p --pathways-version v1",
  f"xpk {COMMON} {LOCAL} {PLACE} --max-restarts 5 --save-gigabytes-per-second 0.05",
  f"gcluster {COMMON} {ELASTIC} {PLACE} --elastic-slices 1 --cache-volume compiled --pathways-version v1",
  f"gcluster {COMMON} {LOCAL} --step-seconds 60 --service-account writer",
  f"jobset {COMMON} services=wandb,goodput --image-extras wandb,goodput",
  f"jobset {COMMON} {GRAIN} grain_file_type=arrayrecord grain_train_files=/cache/data --cache-volume gs://data",
  f"gcluster {COMMON} {GRAIN} grain_file_type=parquet grain_train_files=gs://one/a;gs://two/b*.parquet",
)


def render(arguments: Sequence[str]) -> str:
  """What the command prints for these arguments. Raises ConfigError if they do not fit together."""
  return manifest.render(manifest.parser().parse_intermixed_args(arguments))


def one_line(command: str) -> str:
  """A printed command without its comments, on one line."""
  lines = [line for line in command.splitlines() if not line.startswith("#")]
  return " ".join(line.removesuffix("\\").strip() for line in lines)
