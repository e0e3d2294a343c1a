"""The commands and the YAML of the published guides come out word for word, but for names and the program."""

from __future__ import annotations

import shlex

import yaml
from tests.launch.manifest.cases import one_line, render

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
# The guide to emergency checkpoints, "Example XPK workload creation command".
EMERGENCY_GUIDE = """\
python3 xpk/xpk.py workload create \\
--cluster ${CLUSTER_NAME?} \\
--docker-image ${DOCKER_IMAGE?} \\
--workload ${RUN_NAME?} \\
--tpu-type=${TPU_TYPE?} \\
--num-slices=${NUM_SLICES?} \\
--ramdisk-directory=${RAMDISK_DIRECTORY?} \\
--mtc-enabled \\
--command "python3 src/maxtext/trainers/pre_train/train.py src/maxtext/configs/base.yml \
base_output_directory=${BASE_OUTPUT_DIRECTORY?} dataset_path=${DATA_PATH?} steps=120 per_device_batch_size=6 \
enable_checkpoint_cloud_logger=True checkpoint_period=${CHECKPOINT_PERIOD?} enable_emergency_checkpoint=True \
local_checkpoint_period=${LOCAL_CHECKPOINT_PERIOD?} local_checkpoint_directory=/${RAMDISK_DIRECTORY?}"
"""
# The guide to pathwaysutils.elastic, section 1.
PATHWAYSJOB_GUIDE = """\
apiVersion: pathways-job.pathways.domain/v1
kind: PathwaysJob
metadata:
  name: ${RUN_NAME?}
spec:
  maxRestarts: 0
  workers:
  - type: ct5lp-hightpu-4t
    topology: 4x8
    numSlices: 3
    maxSliceRestarts: 2
  pathwaysDir: "gs://my-bucket"
  controller:
    deploymentMode: default
    elasticSlices: 1
    template:
      spec:
        containers:
        - name: main
          image: ${DOCKER_IMAGE?}
          imagePullPolicy: Always
          command:
          - bash
          - -c
          - >
            python3 -m MaxText.elastic_train MaxText/configs/base.yml
            base_output_directory=gs://my-bucket
            per_device_batch_size=4
            enable_checkpointing=false
            remat_policy=full
            global_parameter_scale=8
            steps=50
            max_target_length=2048
            use_iota_embed=true
            reuse_example_batch=1
            dataset_type=synthetic
            attention=flash
            gcs_metrics=True
            enable_pathways_goodput=True
            run_name=${RUN_NAME?}
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


def options(command: str) -> dict[str, str]:
  """{option: value} of a command, whose values follow after = or after a space."""
  words = shlex.split(one_line(command))
  found: dict[str, str] = {}
  for word, following in zip(words, [*words[1:], "--"]):
    if word.startswith("--"):
      name, _, value = word.partition("=")
      found[name] = value or ("" if following.startswith("--") else following)
  return found


def test_the_command_of_the_emergency_guide():
  more = f"{HARDWARE} {PLACE} --max-restarts 0 --workload elastic-qwen3"
  printed = render(["xpk", *keys(EMERGENCY_GUIDE), *more.split()])
  assert one_line(printed).startswith("xpk workload create --")
  found = options(printed)
  # The guide sets project and zone with gcloud before.
  assert (found.pop("--project"), found.pop("--zone")) == ("my-project", "us-central1")
  assert found == options(with_our_names(EMERGENCY_GUIDE))


def contained(part: object, whole: object) -> bool:
  """Whether every entry of `part` is in `whole` with the same value."""
  if isinstance(part, dict) and isinstance(whole, dict):
    return all(key in whole and contained(value, whole[key]) for key, value in part.items())
  if isinstance(part, list) and isinstance(whole, list):
    return len(part) == len(whole) and all(map(contained, part, whole))
  return part == whole


def test_the_yaml_of_the_pathwaysutils_guide():
  # Their script is elastic without being told; this program is told.
  added = ["enable_single_controller=true", "elastic_enabled=true", "elastic_max_retries=3"]
  more = f"{HARDWARE} --tpu-type v5litepod-32 --elastic-slices 1 --max-slice-restarts 2 --max-restarts 0"
  printed = yaml.safe_load(render(["pathwaysjob", *keys(PATHWAYSJOB_GUIDE), *added, *more.split()]))
  guide = yaml.safe_load(with_our_names(PATHWAYSJOB_GUIDE))
  command = guide["spec"]["controller"]["template"]["spec"]["containers"][0]["command"]
  command[2] = " ".join([*command[2].split(), *added])
  assert contained(guide, printed)
  assert not contained(guide | {"kind": "JobSet"}, printed)
