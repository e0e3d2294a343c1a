"""What must fit together in a job. Each function yields one message per broken rule: value, rule, remedy."""

from __future__ import annotations

import re
from collections.abc import Iterator

from trainer.config import config_files
from trainer.launch.manifest import budget
from trainer.launch.manifest.gke_plan import FIXED_GRACE, GkePlan

# The label that leads pods to the Pathways head is NAME-pathways-head-0-0.NAME, and Kubernetes allows 63 characters.
_LONGEST_PATHWAYS_NAME = 22
# Options that are names, and how Kubernetes, Google Cloud and image registries spell them. Without this check, a space
# or a semicolon would end a word of the printed command.
_NAMES = {
  "cluster": r"[A-Za-z0-9][\w.:-]*",
  "project": r"[a-z][a-z0-9.:-]*",
  "zone": r"[a-z][a-z0-9-]*",
  "workload": r".+",  # more in _name
  "service_account": r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?",
  "queue": r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?",
  "pathways_version": r"\w[\w.-]*",
  "pathways_gcs_location": r"[\w./:-]+",
}
ONLY_PACKAGED = (
  "the container does not have this file.\n"
  "Copy it below configs/ before the image is built, and give its path from there: configs/NAME.yml."
)
_LONGEST_NAME = {"gcluster": 28, "xpk": 40, "jobset": 40, "pathwaysjob": 22}


def problems(plan: GkePlan) -> Iterator[str]:
  for rule in (_names, _name, _files, _target, _slices, _elastic, _restarts, _grace, _ramdisk, _cache):
    yield from rule(plan)


def _names(plan: GkePlan) -> Iterator[str]:
  for name, pattern in _NAMES.items():
    value = getattr(plan.options, name)
    if value is not None and not re.fullmatch(pattern, value, flags=re.ASCII):
      option = f"--{name.replace('_', '-')}"
      yield f"{option} {value!r}: is not a name.\nGive {option} a name of letters, digits and hyphens, or leave it out."


def _name(plan: GkePlan) -> Iterator[str]:
  longest = min(_LONGEST_NAME[plan.options.target], _LONGEST_PATHWAYS_NAME if plan.pathways else 63)
  if not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", plan.name) or len(plan.name) > longest:
    behind = " behind Pathways" if plan.pathways else ""
    yield (
      f"--workload {plan.name}: a name for {plan.options.target}{behind} has at most {longest} characters, all of them "
      "a-z, 0-9 or -, and begins with a letter.\nGive --workload NAME. The key run_name can be longer."
    )
  if not re.fullmatch(r"[\w./:@-]+", plan.options.image):
    yield f"--image {plan.options.image!r}: is not the name of an image.\nWrite REGISTRY/NAME:TAG."


def _files(plan: GkePlan) -> Iterator[str]:
  path, model = plan.options.config[0], plan.config.model.model_name
  if not config_files.is_in_package(path):
    yield f"{path}: {ONLY_PACKAGED}"
  if model.endswith((".yml", ".yaml")) and not config_files.is_in_package(model):
    yield f"model_name={model}: {ONLY_PACKAGED}"
  folders = {"base_output_directory=": plan.config.run.base_output_directory}
  if plan.options.pathways_gcs_location is not None:
    folders["--pathways-gcs-location "] = plan.options.pathways_gcs_location
  for name, value in folders.items():
    if not value.startswith("gs://"):
      yield (
        f"{name}{value}: must be in Cloud Storage, because the disk of a pod is lost with it.\n"
        "Write gs://BUCKET/FOLDER."
      )


def _target(plan: GkePlan) -> Iterator[str]:
  kind, target = plan.config.cluster.cluster, plan.options.target
  if target == "pathwaysjob" and not plan.pathways:
    yield "pathwaysjob: is a job behind Pathways.\nSet enable_single_controller=true, or print a jobset."
  if target == "pathwaysjob" and plan.slice.machine_type.startswith("tpu7x"):
    yield f"--tpu-type {plan.options.tpu_type}: a PathwaysJob cannot have this machine type.\nPrint a jobset."
  if target == "xpk" and not re.fullmatch(r"(v4|v5p|v5litepod|v6e|tpu7x)-[0-9]+", plan.options.tpu_type):
    yield f"--tpu-type {plan.options.tpu_type}: xpk has no such name.\nWrite it like v5litepod-16, v6e-256 or v5p-128."
  if plan.config.cluster.cluster_standin:
    yield (
      f"cluster_standin={plan.config.cluster.cluster_standin}: is a stand-in for Pathways, and would train on CPUs.\n"
      "Remove cluster_standin."
    )
  fitting = ("auto", "pathways") if plan.pathways else ("auto",)
  if kind not in fitting:
    yield (
      f"cluster={kind}: with enable_single_controller={str(plan.pathways).lower()} the job on GKE needs "
      f"cluster={' or cluster='.join(fitting)}.\nRemove the key cluster, or change enable_single_controller."
    )
  if target not in ("xpk", "gcluster") and not plan.options.cluster and (plan.options.project or plan.options.zone):
    yield "--project and --zone: say where a cluster is.\nGive --cluster too, or remove them."
  if target == "xpk":
    for name in ("cluster", "project", "zone"):
      if getattr(plan.options, name) is None:
        yield f"xpk needs the {name}.\nGive --{name}."
    for name in ("service_account", "queue"):
      if getattr(plan.options, name) is not None:
        yield f"--{name.replace('_', '-')}: has no effect with xpk, which chooses it.\nRemove it, or print a jobset."


def _slices(plan: GkePlan) -> Iterator[str]:
  wanted = plan.config.cluster.num_slices
  if wanted not in (0, plan.num_slices):
    yield f"num_slices={wanted}: differs from --num-slices {plan.num_slices}.\nRemove one of them."
  given = {
    "--pathways-gcs-location": plan.options.pathways_gcs_location,
    "--pathways-version": plan.options.pathways_version,
  }
  for name, value in given.items():
    if value is not None and not plan.pathways:
      yield f"{name} {value}: has no effect without Pathways.\nRemove it, or set enable_single_controller=true."


def _elastic(plan: GkePlan) -> Iterator[str]:
  """The launcher and the program agree on how many slices may be missing, and how often."""
  lost, elastic = plan.options.elastic_slices, plan.config.elastic
  least = elastic.elastic_min_slice_count
  if plan.pathways and lost >= plan.num_slices:
    yield (
      f"--elastic-slices {lost}: of --num-slices {plan.num_slices} at least one must remain.\n"
      f"Give at most {plan.num_slices - 1}."
    )
  if not plan.pathways:
    if lost or elastic.elastic_enabled:
      yield (
        f"--elastic-slices {lost}, elastic_enabled={str(elastic.elastic_enabled).lower()}: without Pathways, a lost "
        "slice ends the processes of all slices.\nSet enable_single_controller=true, or remove both."
      )
    return
  if elastic.elastic_enabled != (lost > 0):
    yield (
      f"--elastic-slices {lost}, elastic_enabled={str(elastic.elastic_enabled).lower()}: the launcher keeps a job "
      "without a slice, and the program continues without it, only together.\nGive --elastic-slices above 0 and "
      "elastic_enabled=true, or neither."
    )
  if not lost:
    if plan.options.max_slice_restarts is not None:
      yield (
        f"--max-slice-restarts {plan.max_slice_restarts}: has no effect without --elastic-slices.\n"
        "Give --elastic-slices and elastic_enabled=true, or remove it."
      )
    return
  if least > plan.num_slices:
    yield (
      f"elastic_min_slice_count={least}: the job has --num-slices {plan.num_slices}.\n"
      f"Give at most {plan.num_slices}, or -1 for all slices."
    )
  elif -1 < least < plan.num_slices - lost:
    yield (
      f"elastic_min_slice_count={least}: Pathways ends the job if more than --elastic-slices {lost} of "
      f"{plan.num_slices} slices are missing.\nGive elastic_min_slice_count={plan.num_slices - lost}, or more "
      "--elastic-slices."
    )
  if plan.max_slice_restarts < elastic.elastic_max_retries - 1:
    yield (
      f"--max-slice-restarts {plan.max_slice_restarts}: elastic_max_retries={elastic.elastic_max_retries} allows "
      f"{elastic.elastic_max_retries - 1} recoveries without progress.\nGive --max-slice-restarts "
      f"{elastic.elastic_max_retries - 1} or more, or elastic_max_retries={plan.max_slice_restarts + 1}."
    )


def _restarts(plan: GkePlan) -> Iterator[str]:
  if plan.max_restarts and plan.options.target == "xpk" and plan.pathways:
    yield (
      f"--max-restarts {plan.max_restarts}: xpk ignores it behind Pathways, so exit code 42 would end the job.\n"
      "Remove it, or print a jobset, which restarts."
    )
  if plan.max_restarts and not plan.config.checkpoint.enable_checkpointing:
    yield (
      f"--max-restarts {plan.max_restarts}: with enable_checkpointing=false a restarted run begins at step 0.\n"
      "Set enable_checkpointing=true, or give --max-restarts 0."
    )


def _grace(plan: GkePlan) -> Iterator[str]:
  """A save fits the time that the pods are given."""
  if plan.pathways and plan.options.target in FIXED_GRACE and plan.grace_seconds > budget.DEFAULT_GRACE_SECONDS:
    yield (
      f"A save needs {plan.grace_seconds} s after SIGTERM ({plan.save_seconds:.1f} s to write "
      f"{budget.checkpoint_bytes(plan.config) / 1e9:.1f} GB), and the Pathways head of {plan.options.target} has "
      f"{budget.DEFAULT_GRACE_SECONDS} s.\nPrint a jobset, or give --save-gigabytes-per-second and --step-seconds as "
      "measured."
    )
  stated = plan.config.checkpoint.autocheckpoint_grace_seconds
  if stated > plan.grace_seconds:
    yield (
      f"autocheckpoint_grace_seconds={stated:g}: the pods will have {plan.grace_seconds} s.\n"
      "Remove the key: this command adds it where it is needed."
    )


def _ramdisk(plan: GkePlan) -> Iterator[str]:
  kind, generator = plan.options.ramdisk, plan.options.target in ("xpk", "gcluster")
  if not plan.ramdisk_mebibytes:
    if kind:
      yield f"--ramdisk {kind}: nothing would use it.\nSet enable_emergency_checkpoint=true, or remove it."
    return
  if not plan.config.checkpoint.local_checkpoint_directory.startswith("/"):
    yield (
      f"local_checkpoint_directory={plan.config.checkpoint.local_checkpoint_directory}: the ramdisk is mounted there, "
      "so it must begin with /.\nWrite local_checkpoint_directory=/local."
    )
  if plan.pathways and (generator or kind == "csi"):
    yield (
      f"enable_emergency_checkpoint=true: behind Pathways the controller writes the local copies, and "
      f"{plan.options.target if generator else '--ramdisk csi'} has ramdisks on TPU hosts only.\n"
      "Print a jobset with --ramdisk emptydir, or set enable_emergency_checkpoint=false."
    )
  elif generator and kind == "emptydir":
    yield f"--ramdisk emptydir: {plan.options.target} has only csi.\nGive --ramdisk csi, or print a jobset."


def _cache(plan: GkePlan) -> Iterator[str]:
  volume, folder = plan.options.cache_volume, plan.config.run.jax_cache_dir
  if volume is None:
    return
  if plan.options.target == "xpk":
    yield f"--cache-volume {volume}: xpk cannot mount it.\nSet jax_cache_dir=gs://BUCKET/FOLDER instead."
  elif any(word.startswith("jax_cache_dir=") for word in plan.options.config):
    yield f"--cache-volume {volume}, jax_cache_dir={folder}: the volume is the folder.\nRemove one of them."
  elif not re.fullmatch(r"(gs://)?[a-z0-9][a-z0-9._-]*", volume):
    yield f"--cache-volume {volume}: must be a PersistentVolumeClaim or a bucket.\nWrite NAME or gs://BUCKET."
