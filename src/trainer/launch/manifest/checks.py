"""What must fit together in a job. Each function yields one message per broken rule: value, rule, remedy."""

from __future__ import annotations

import re
from collections.abc import Iterator

from trainer.config import files
from trainer.launch.manifest import budget
from trainer.launch.manifest.job import Job

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
# Targets that do not set the grace period of the Pathways head: it is DEFAULT_GRACE_SECONDS.
FIXED_GRACE = ("xpk", "gcluster")
_LONGEST_NAME = {"gcluster": 28, "xpk": 40, "jobset": 40, "pathwaysjob": 22, "rayjob": 40}


def problems(job: Job) -> Iterator[str]:
  """All broken rules."""
  for rule in (_names, _name, _files, _target, _slices, _elastic, _restarts, _grace, _ramdisk, _cache):
    yield from rule(job)


def _names(job: Job) -> Iterator[str]:
  for name, pattern in _NAMES.items():
    value = getattr(job.options, name)
    if value is not None and not re.fullmatch(pattern, value, flags=re.ASCII):
      option = f"--{name.replace('_', '-')}"
      yield f"{option} {value!r}: is not a name.\nGive {option} a name of letters, digits and hyphens, or leave it out."


def _name(job: Job) -> Iterator[str]:
  longest = min(_LONGEST_NAME[job.options.target], _LONGEST_PATHWAYS_NAME if job.pathways else 63)
  if not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", job.name) or len(job.name) > longest:
    behind = " behind Pathways" if job.pathways else ""
    yield (
      f"--workload {job.name}: a name for {job.options.target}{behind} has at most {longest} characters, all of them "
      "a-z, 0-9 or -, and begins with a letter.\nGive --workload NAME. The key run_name can be longer."
    )
  if not re.fullmatch(r"[\w./:@-]+", job.options.image):
    yield f"--image {job.options.image!r}: is not the name of an image.\nWrite REGISTRY/NAME:TAG."


def _files(job: Job) -> Iterator[str]:
  path, model = job.options.config[0], job.config.model.model_name
  if not files.is_in_package(path):
    yield f"{path}: {ONLY_PACKAGED}"
  if model.endswith((".yml", ".yaml")) and not files.is_in_package(model):
    yield f"model_name={model}: {ONLY_PACKAGED}"
  folders = {"base_output_directory=": job.config.run.base_output_directory}
  if job.options.pathways_gcs_location is not None:
    folders["--pathways-gcs-location "] = job.options.pathways_gcs_location
  for name, value in folders.items():
    if not value.startswith("gs://"):
      yield (
        f"{name}{value}: must be in Cloud Storage, because the disk of a pod is lost with it.\n"
        "Write gs://BUCKET/FOLDER."
      )


def _target(job: Job) -> Iterator[str]:
  kind, target = job.config.cluster.cluster, job.options.target
  if target == "pathwaysjob" and not job.pathways:
    yield "pathwaysjob: is a job behind Pathways.\nSet enable_single_controller=true, or print a jobset."
  if target == "pathwaysjob" and job.slice.machine_type.startswith("tpu7x"):
    yield f"--tpu-type {job.options.tpu_type}: a PathwaysJob cannot have this machine type.\nPrint a jobset."
  if target == "xpk" and not re.fullmatch(r"(v4|v5p|v5litepod|v6e|tpu7x)-[0-9]+", job.options.tpu_type):
    yield f"--tpu-type {job.options.tpu_type}: xpk has no such name.\nWrite it like v5litepod-16, v6e-256 or v5p-128."
  if target == "rayjob" and job.pathways:
    yield "rayjob: Ray starts a process on every host.\nSet enable_single_controller=false, or print a jobset."
  if job.config.cluster.cluster_standin:
    yield (
      f"cluster_standin={job.config.cluster.cluster_standin}: is a stand-in for Pathways, and would train on CPUs.\n"
      "Remove cluster_standin."
    )
  fitting = ("auto", "pathways") if job.pathways else ("auto",)
  if target != "rayjob" and kind not in fitting:
    yield (
      f"cluster={kind}: with enable_single_controller={str(job.pathways).lower()} the job on GKE needs "
      f"cluster={' or cluster='.join(fitting)}.\nRemove the key cluster, or change enable_single_controller."
    )
  if target not in ("xpk", "gcluster") and not job.options.cluster and (job.options.project or job.options.zone):
    yield "--project and --zone: say where a cluster is.\nGive --cluster too, or remove them."
  if target == "xpk":
    for name in ("cluster", "project", "zone"):
      if getattr(job.options, name) is None:
        yield f"xpk needs the {name}.\nGive --{name}."
    for name in ("service_account", "queue"):
      if getattr(job.options, name) is not None:
        yield f"--{name.replace('_', '-')}: has no effect with xpk, which chooses it.\nRemove it, or print a jobset."


def _slices(job: Job) -> Iterator[str]:
  wanted = job.config.cluster.num_slices
  if wanted not in (0, job.num_slices):
    yield f"num_slices={wanted}: differs from --num-slices {job.num_slices}.\nRemove one of them."
  given = {
    "--pathways-gcs-location": job.options.pathways_gcs_location,
    "--pathways-version": job.options.pathways_version,
  }
  for name, value in given.items():
    if value is not None and not job.pathways:
      yield f"{name} {value}: has no effect without Pathways.\nRemove it, or set enable_single_controller=true."


def _elastic(job: Job) -> Iterator[str]:
  """The launcher and the program agree on how many slices may be missing, and how often."""
  lost, elastic = job.options.elastic_slices, job.config.elastic
  least = elastic.elastic_min_slice_count
  if job.options.target == "rayjob":
    yield from _elastic_under_ray(job)
    return
  if not job.pathways:
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
  if lost >= job.num_slices:
    yield (
      f"--elastic-slices {lost}: of --num-slices {job.num_slices} at least one must remain.\n"
      f"Give at most {job.num_slices - 1}."
    )
  if not lost:
    if job.options.max_slice_restarts is not None:
      yield (
        f"--max-slice-restarts {job.max_slice_restarts}: has no effect without --elastic-slices.\n"
        "Give --elastic-slices and elastic_enabled=true, or remove it."
      )
    return
  if least > job.num_slices:
    yield (
      f"elastic_min_slice_count={least}: the job has --num-slices {job.num_slices}.\n"
      f"Give at most {job.num_slices}, or -1 for all slices."
    )
  elif -1 < least < job.num_slices - lost:
    yield (
      f"elastic_min_slice_count={least}: Pathways ends the job if more than --elastic-slices {lost} of "
      f"{job.num_slices} slices are missing.\nGive elastic_min_slice_count={job.num_slices - lost}, or more "
      "--elastic-slices."
    )
  if job.max_slice_restarts < elastic.elastic_max_retries - 1:
    yield (
      f"--max-slice-restarts {job.max_slice_restarts}: elastic_max_retries={elastic.elastic_max_retries} allows "
      f"{elastic.elastic_max_retries - 1} recoveries without progress.\nGive --max-slice-restarts "
      f"{elastic.elastic_max_retries} or more, or elastic_max_retries={job.max_slice_restarts + 1}."
    )


def _elastic_under_ray(job: Job) -> Iterator[str]:
  if job.least_slices < 1:
    yield (
      f"--elastic-slices {job.options.elastic_slices}: of --num-slices {job.num_slices} at least one must remain.\n"
      f"Give at most {job.num_slices - 1}."
    )
  if job.options.max_slice_restarts is not None:
    yield (
      f"--max-slice-restarts {job.max_slice_restarts}: has no effect in a rayjob, where elastic_max_retries limits "
      "the restarts without progress.\nRemove it."
    )


def _restarts(job: Job) -> Iterator[str]:
  if job.options.max_restarts is not None and job.options.target == "rayjob":
    yield f"--max-restarts {job.max_restarts}: has no effect in a rayjob, where Ray restarts workers.\nRemove it."
  if job.max_restarts and job.options.target == "xpk" and job.pathways:
    yield (
      f"--max-restarts {job.max_restarts}: xpk ignores it behind Pathways, so exit code 42 would end the job.\n"
      "Remove it, or print a jobset, which restarts."
    )
  if job.max_restarts and not job.config.checkpoint.enable_checkpointing:
    yield (
      f"--max-restarts {job.max_restarts}: with enable_checkpointing=false a restarted run begins at step 0.\n"
      "Set enable_checkpointing=true, or give --max-restarts 0."
    )


def _grace(job: Job) -> Iterator[str]:
  """A save fits the time that the pods are given."""
  if job.pathways and job.options.target in FIXED_GRACE and job.grace_seconds > budget.DEFAULT_GRACE_SECONDS:
    yield (
      f"A save needs {job.grace_seconds} s after SIGTERM ({job.save_seconds:.1f} s to write "
      f"{budget.checkpoint_bytes(job.config) / 1e9:.1f} GB), and the Pathways head of {job.options.target} has "
      f"{budget.DEFAULT_GRACE_SECONDS} s.\nPrint a jobset, or give --save-gigabytes-per-second and --step-seconds as "
      "measured."
    )
  stated = job.config.checkpoint.autocheckpoint_grace_seconds
  if stated > job.grace_seconds:
    yield (
      f"autocheckpoint_grace_seconds={stated:g}: the pods will have {job.grace_seconds} s.\n"
      "Remove the key: this command adds it where it is needed."
    )


def _ramdisk(job: Job) -> Iterator[str]:
  kind, generator = job.options.ramdisk, job.options.target in ("xpk", "gcluster")
  if not job.ramdisk_mebibytes:
    if kind:
      yield f"--ramdisk {kind}: nothing would use it.\nSet enable_emergency_checkpoint=true, or remove it."
    return
  if not job.config.checkpoint.local_checkpoint_directory.startswith("/"):
    yield (
      f"local_checkpoint_directory={job.config.checkpoint.local_checkpoint_directory}: the ramdisk is mounted there, "
      "so it must begin with /.\nWrite local_checkpoint_directory=/local."
    )
  if job.pathways and (generator or kind == "csi"):
    yield (
      f"enable_emergency_checkpoint=true: behind Pathways the controller writes the local copies, and "
      f"{job.options.target if generator else '--ramdisk csi'} has ramdisks on TPU hosts only.\n"
      "Print a jobset with --ramdisk emptydir, or set enable_emergency_checkpoint=false."
    )
  elif generator and kind == "emptydir":
    yield f"--ramdisk emptydir: {job.options.target} has only csi.\nGive --ramdisk csi, or print a jobset."


def _cache(job: Job) -> Iterator[str]:
  volume, folder = job.options.cache_volume, job.config.run.jax_cache_dir
  if volume is None:
    return
  if job.options.target == "xpk":
    yield f"--cache-volume {volume}: xpk cannot mount it.\nSet jax_cache_dir=gs://BUCKET/FOLDER instead."
  elif any(word.startswith("jax_cache_dir=") for word in job.options.config):
    yield f"--cache-volume {volume}, jax_cache_dir={folder}: the volume is the folder.\nRemove one of them."
  elif not re.fullmatch(r"(gs://)?[a-z0-9][a-z0-9._-]*", volume):
    yield f"--cache-volume {volume}: must be a PersistentVolumeClaim or a bucket.\nWrite NAME or gs://BUCKET."
