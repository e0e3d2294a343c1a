"""The commands of gcluster (Cluster Toolkit) and xpk, one option per line."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

from trainer.config import ConfigError
from trainer.launch.manifest.plan import CACHE_FOLDER, GkePlan

# A killed process (137), a segmentation fault (139) and an unhandled SIGTERM (143) say nothing about the input.
_RESTART_ON = "42,134,137,139,143"
# Without TPUs the program must fail, not train on the CPU.
_TPU_ENVIRONMENT = "env JAX_PLATFORMS=tpu,cpu "
# The Pathways head of some versions of gcluster gives the program no environment. The proxy is in the same pod.
_PATHWAYS_ENVIRONMENT = "env JAX_PLATFORMS=proxy JAX_BACKEND_TARGET=grpc://localhost:29000 "


def xpk(plan: GkePlan) -> str:
  """An `xpk workload create` command, or `create-pathways` behind Pathways."""
  given, comments = plan.options, plan.summary
  server, proxy = (plan.server_image, plan.proxy_image) if given.pathways_version else (None, None)
  if plan.pathways:
    comments.append("xpk does not restart a job behind Pathways: after exit code 42 or 134, give the command again.")
  if plan.ramdisk_mebibytes:
    comments.append(f"Create the cluster with --enable-mtc --mtc-ramdisk-size={plan.ramdisk_mebibytes}Mi.")
  options = {
    "workload": plan.name,
    "cluster": given.cluster,
    "project": given.project,
    "zone": given.zone,
    "tpu-type": given.tpu_type,
    "num-slices": plan.num_slices,
    "docker-image": given.image,
    "elastic-slices": plan.elastic_slices,
    "max-slice-restarts": plan.slice_restarts,
    "pathways-gcs-location": given.pathways_gcs_location,
    "server-image": server,
    "proxy-server-image": proxy,
    "max-restarts": plan.max_restarts or None,
    "termination-grace-period-seconds": plan.long_grace,
    # xpk writes a / before the path.
    "ramdisk-directory": plan.local_folder.lstrip("/") if plan.ramdisk_mebibytes else None,
    "mtc-enabled": plan.ramdisk_mebibytes > 0,
  }
  program, environment = ("create-pathways", "") if plan.pathways else ("create", _TPU_ENVIRONMENT)
  return _text(comments, f"xpk workload {program}", options, environment, plan)


def gcluster(plan: GkePlan) -> str:
  """A `gcluster job submit` command."""
  given, comments = plan.options, plan.summary
  server, proxy = (plan.server_image, plan.proxy_image) if given.pathways_version else (None, None)
  if plan.pathways:
    comments.append("gcluster restarts a job behind Pathways after every exit code except 0, also after 1 and 2.")
  if plan.ramdisk_mebibytes:
    comments.append(f"The cluster's CheckpointConfiguration needs inMemoryVolumeSize: {plan.ramdisk_mebibytes}Mi.")
  options = {
    "image": given.image,
    "name": plan.name,
    "cluster": given.cluster,
    "project": given.project,
    "location": given.zone,
    "compute-type": plan.slice.machine_type,
    "topology": plan.slice.topology,
    "num-slices": plan.num_slices,
    "restarts": plan.max_restarts,
    "pathways": plan.pathways,
    "pathways-gcs-location": plan.pathways_folder if plan.pathways else None,
    "pathways-elastic-slices": plan.elastic_slices,
    "pathways-max-slice-restarts": plan.slice_restarts,
    "pathways-server-image": server,
    "pathways-worker-image": server,
    "pathways-proxy-server-image": proxy,
    "restart-on-exit-codes": None if plan.pathways else _RESTART_ON,
    "grace-period": f"{plan.long_grace}s" if plan.long_grace else None,
    "gke-mtc-enabled": plan.ramdisk_mebibytes > 0,
    "gke-mtc-ramdisk-dir": plan.local_folder if plan.ramdisk_mebibytes else None,
    "mount": shlex.quote(f"{given.cache_volume};{CACHE_FOLDER};rw") if given.cache_volume else None,
    "service-account": given.service_account,
    "queue": given.queue,
  }
  environment = _PATHWAYS_ENVIRONMENT if plan.pathways else _TPU_ENVIRONMENT
  return _text(comments, "gcluster job submit", options, environment, plan)


def _text(comments: list[str], program: str, options: Mapping[str, object], environment: str, plan: GkePlan) -> str:
  """The comments, and the command with one option and one key per line. options: None, False: left out; True: alone."""
  words = [f"exec {environment}python -m trainer", *map(shlex.quote, plan.words)]
  inner = " \\\n    ".join(map(_in_double_quotes, words))
  given = {name: value for name, value in options.items() if value is not None and value is not False}
  lines = [program, *(f"--{name}" if value is True else f"--{name}={value}" for name, value in given.items())]
  lines.append(f'--command="{inner}"')
  return "".join(f"# {line}\n" for line in comments) + " \\\n  ".join(lines) + "\n"


def _in_double_quotes(text: str) -> str:
  """`text` as a part of a shell word in double quotes. Raises ConfigError for what has no spelling there."""
  if "\n" in text or "!" in text:
    raise ConfigError(f"{text!r}: an interactive shell cannot pass ! or a line break.\nPut the key into the YAML file.")
  return re.sub(r'([\\"$`])', r"\\\1", text)
