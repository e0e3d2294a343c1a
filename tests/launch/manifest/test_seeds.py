"""The commands and the YAML of the published guides come out word for word, but for names and the program."""

from __future__ import annotations

from tests.launch.manifest.cases import render

# The guide to elastic training, section 3, with its variables.
ELASTIC_GUIDE = """\
xpk workload create-pathways \\
  --workload=${RUN_NAME?} \\
  --cluster=${GKE_CLUSTER?} \\
  --project=${PROJECT_ID?} \\
  --zone=${ZONE?} \\
  --tpu-type=${TPU_TYPE?} \\
  --num-slices=${NUM_SLICES?} \\
  --docker-image=${DOCKER_IMAGE?} \\
  --elastic-slices=1 \\
  --max-slice-restarts=10 \\
  --command="python3 -m maxtext.trainers.pre_train.train \\
    src/maxtext/configs/base.yml \\
    base_output_directory=${BASE_OUTPUT_DIRECTORY?} \\
    run_name=${RUN_NAME?} \\
    model_name=qwen3-0.6b \\
    dataset_type=synthetic \\
    per_device_batch_size=1 \\
    max_target_length=2048 \\
    attention=flash \\
    remat_policy=full \\
    steps=5000 \\
    enable_checkpointing=true \\
    checkpoint_period=100 \\
    enable_single_controller=True \\
    elastic_enabled=true \\
    elastic_timeout_seconds=300 \\
    elastic_max_retries=10"
"""
NAMES = {
  "RUN_NAME": "elastic-qwen3",
  "GKE_CLUSTER": "my-cluster",
  "CLUSTER_NAME": "my-cluster",
  "PROJECT_ID": "my-project",
  "ZONE": "us-central1",
  "TPU_TYPE": "v5litepod-16",
  "NUM_SLICES": "3",
  "DOCKER_IMAGE": "gcr.io/my-project/trainer",
  "BASE_OUTPUT_DIRECTORY": "gs://my-bucket/maxtext-runs",
  "RAMDISK_DIRECTORY": "local",
  "DATA_PATH": "gs://my-bucket/texts",
  "CHECKPOINT_PERIOD": "100",
  "LOCAL_CHECKPOINT_PERIOD": "10",
}
# The programs of the guides, and what takes their place.
PROGRAMS = {
  "python3 -m maxtext.trainers.pre_train.train \\\n    src/maxtext/": "exec python -m trainer \\\n    ",
  "python3 src/maxtext/trainers/pre_train/train.py src/maxtext/": "exec env JAX_PLATFORMS=tpu,cpu python -m trainer ",
  "python3 -m MaxText.elastic_train MaxText/": "exec python -m trainer ",
}
HARDWARE = "--image gcr.io/my-project/trainer --tpu-type v5litepod-16 --num-slices 3"
PLACE = "--cluster my-cluster --project my-project --zone us-central1"


def with_our_names(text: str) -> str:
  for name, value in NAMES.items():
    text = text.replace("${" + name + "?}", value)
  for theirs, ours in PROGRAMS.items():
    text = text.replace(theirs, ours)
  return text


def keys(guide: str) -> list[str]:
  """The configuration file and the keys of a guide's command."""
  return with_our_names(guide).split("python -m trainer")[1].replace("\\", " ").replace('"', " ").split()


def test_the_command_of_the_elastic_guide():
  printed = render(["xpk", *keys(ELASTIC_GUIDE), *f"{HARDWARE} {PLACE} --elastic-slices 1".split()])
  comments = [line for line in printed.splitlines() if line.startswith("#")]
  assert printed.split("\n", len(comments))[-1] == with_our_names(ELASTIC_GUIDE)
