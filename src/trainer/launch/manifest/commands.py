"""The commands of gcluster (Cluster Toolkit) and xpk, one option per line."""

from __future__ import annotations

import re
import shlex

from trainer.config import ConfigError
from trainer.launch.manifest import budget
from trainer.launch.manifest.job import CACHE_FOLDER, Job

# A killed process (137), a segmentation fault (139) and an unhandled SIGTERM (143) say nothing about the input.
_RESTART_ON = "42,134,137,139,143"
# Without TPUs the program must fail, not train on the CPU.
_TPU_ENVIRONMENT = "JAX_PLATFORMS=tpu,cpu"
# The Pathways head of some versions of gcluster gives the program no environment. The proxy is in the same pod.
_PATHWAYS_ENVIRONMENT = "JAX_PLATFORMS=proxy JAX_BACKEND_TARGET=grpc://localhost:29000"


def xpk(job: Job) -> str:
  """An `xpk workload create` command, or `create-pathways` behind Pathways."""
  given = job.options
  options = [
    f"--workload={job.name}",
    f"--cluster={given.cluster}",
    f"--project={given.project}",
    f"--zone={given.zone}",
    f"--tpu-type={given.tpu_type}",
    f"--num-slices={job.num_slices}",
    f"--docker-image={given.image}",
  ]
  comments = job.summary
  if job.pathways:
    if given.elastic_slices:
      options += [f"--elastic-slices={given.elastic_slices}", f"--max-slice-restarts={job.max_slice_restarts}"]
    if given.pathways_gcs_location:
      options.append(f"--pathways-gcs-location={given.pathways_gcs_location}")
    if given.pathways_version:
      server, proxy = job.pathways_images
      options += [f"--server-image={server}", f"--proxy-server-image={proxy}"]
    comments.append("xpk does not restart a job behind Pathways: after exit code 42 or 134, give the command again.")
  else:
    if job.max_restarts:
      options.append(f"--max-restarts={job.max_restarts}")
    if job.grace_seconds > budget.DEFAULT_GRACE_SECONDS:
      options.append(f"--termination-grace-period-seconds={job.grace_seconds}")
    if job.ramdisk_mebibytes:
      # xpk writes a / before the path.
      options += [f"--ramdisk-directory={job.local_folder.lstrip('/')}", "--mtc-enabled"]
      comments.append(f"Create the cluster with --enable-mtc --mtc-ramdisk-size={job.ramdisk_mebibytes}Mi.")
  program, environment = ("create-pathways", "") if job.pathways else ("create", _TPU_ENVIRONMENT)
  return _text(comments, f"xpk workload {program}", options, job, environment)


def gcluster(job: Job) -> str:
  """A `gcluster job submit` command."""
  given = job.options
  options = [f"--image={given.image}", f"--name={job.name}"]
  for name, value in (("cluster", given.cluster), ("project", given.project), ("location", given.zone)):
    options += [f"--{name}={value}"] if value else []
  options += [
    f"--compute-type={job.slice.machine_type}",
    f"--topology={job.slice.topology}",
    f"--num-slices={job.num_slices}",
    f"--restarts={job.max_restarts}",
  ]
  comments = job.summary
  if job.pathways:
    options += ["--pathways", f"--pathways-gcs-location={job.pathways_folder}"]
    if given.elastic_slices:
      options += [
        f"--pathways-elastic-slices={given.elastic_slices}",
        f"--pathways-max-slice-restarts={job.max_slice_restarts}",
      ]
    if given.pathways_version:
      server, proxy = job.pathways_images
      options += [f"--pathways-{role}-image={server}" for role in ("server", "worker")]
      options.append(f"--pathways-proxy-server-image={proxy}")
    comments.append("gcluster restarts a job behind Pathways after every exit code except 0, also after 1 and 2.")
  else:
    options.append(f"--restart-on-exit-codes={_RESTART_ON}")
    if job.grace_seconds > budget.DEFAULT_GRACE_SECONDS:
      options.append(f"--grace-period={job.grace_seconds}s")
    if job.ramdisk_mebibytes:
      options += ["--gke-mtc-enabled", f"--gke-mtc-ramdisk-dir={job.local_folder}"]
      comments.append(f"The cluster's CheckpointConfiguration needs inMemoryVolumeSize: {job.ramdisk_mebibytes}Mi.")
  if given.cache_volume:
    options.append(f"--mount={shlex.quote(f'{given.cache_volume};{CACHE_FOLDER};rw')}")
  for name, value in (("service-account", given.service_account), ("queue", given.queue)):
    options += [f"--{name}={value}"] if value else []
  environment = _PATHWAYS_ENVIRONMENT if job.pathways else _TPU_ENVIRONMENT
  return _text(comments, "gcluster job submit", options, job, environment)


def _text(comments: list[str], program: str, options: list[str], job: Job, environment: str) -> str:
  """The comments, and the command with one option and one key per line. environment: NAME=value for the program."""
  first = f"exec env {environment} python -m trainer" if environment else "exec python -m trainer"
  words = [first, *map(shlex.quote, job.words)]
  inner = " \\\n    ".join(map(_in_double_quotes, words))
  lines = [program, *options, f'--command="{inner}"']
  return "".join(f"# {line}\n" for line in comments) + " \\\n  ".join(lines) + "\n"


def _in_double_quotes(text: str) -> str:
  """`text` as a part of a shell word in double quotes. Raises ConfigError for what has no spelling there."""
  if "\n" in text or "!" in text:
    raise ConfigError(f"{text!r}: an interactive shell cannot pass ! or a line break.\nPut the key into the YAML file.")
  return re.sub(r'([\\"$`])', r"\\\1", text)
