"""The text of a job: comments, then a command or objects for Kubernetes: templates.yml with the values of a plan."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from trainer.config import ConfigError
from trainer.launch.manifest import budget
from trainer.launch.manifest.gke_plan import CACHE_FOLDER, GkePlan

# The targets that are commands; the others are objects.
_COMMANDS = {"gcluster": "gcluster job submit", "xpk": "xpk workload create"}
TARGETS = (*_COMMANDS, "jobset", "pathwaysjob")
# What a target does with a job behind Pathways, and what it needs for a ramdisk of so many MiB.
_BEHIND_PATHWAYS = {
  "gcluster": "gcluster restarts a job behind Pathways after every exit code except 0, also after 1 and 2.",
  "xpk": "xpk does not restart a job behind Pathways: after exit code 42 or 134, give the command again.",
  "pathwaysjob": "A PathwaysJob restarts after every exit code except 0, also after 1 and 2. A jobset does not.",
}
_FOR_RAMDISK = {
  "gcluster": "The cluster's CheckpointConfiguration needs inMemoryVolumeSize: {}Mi.",
  "xpk": "Create the cluster with --enable-mtc --mtc-ramdisk-size={}Mi.",
}
# A killed process (137), a segmentation fault (139) and an unhandled SIGTERM (143) say nothing about the input.
_RESTART_ON = "42,134,137,139,143"
# Without TPUs the program must fail, not train on the CPU.
_TPU_ENVIRONMENT = "env JAX_PLATFORMS=tpu,cpu "
# Behind Pathways. xpk gives the program its environment; the head of some versions of gcluster gives none. The proxy is
# in the same pod.
_PATHWAYS_ENVIRONMENTS = {
  "gcluster": "env JAX_PLATFORMS=proxy JAX_BACKEND_TARGET=grpc://localhost:29000 ",
  "xpk": "",
}
_USER = 1000  # of docker/Dockerfile
_CONTROLLER_BYTES = 16e9  # of the program itself; two copies of the state come on top, while a checkpoint is written
_WORKER_RESTARTS = 4  # of each host of a slice, if the job is not elastic
_IMAGES = "us-docker.pkg.dev/cloud-tpu-v2-images/pathways"  # the public images of the Pathways servers


def render(plan: GkePlan) -> str:
  target, value = plan.options.target, _values(plan)
  templates = yaml.safe_load(Path(__file__).with_name("templates.yml").read_text())
  comments = "".join(f"# {line}\n" for line in _comments(plan))
  if target in _COMMANDS:
    return comments + _command(plan, _fill(templates[target], value))
  # A csi ramdisk needs a CheckpointConfiguration in the cluster.
  kinds = ["CheckpointConfiguration"] if plan.ramdisk_mebibytes and plan.ramdisk == "csi" else []
  kinds.append("jobset behind Pathways" if target == "jobset" and plan.pathways else target)
  objects = [_fill(templates[kind], value) for kind in kinds]
  return comments + "---\n".join(yaml.safe_dump(node, sort_keys=False, width=118) for node in objects)


def _comments(plan: GkePlan) -> list[str]:
  """How to reach the cluster, the assumptions behind the numbers, and what the target does or needs."""
  options, lines = plan.options, list(plan.summary)
  if options.cluster and options.target not in _COMMANDS:
    place = {"location": options.zone, "project": options.project}
    words = [f"--{name} {value}" for name, value in place.items() if value]
    lines.insert(0, " ".join(["gcloud container clusters get-credentials", options.cluster, *words]))
  if plan.pathways and options.target in _BEHIND_PATHWAYS:
    lines.append(_BEHIND_PATHWAYS[options.target])
  if plan.ramdisk_mebibytes and options.target in _FOR_RAMDISK:
    lines.append(_FOR_RAMDISK[options.target].format(plan.ramdisk_mebibytes))
  return lines


def _command(plan: GkePlan, options: Sequence[str]) -> str:
  """A command with one option, and one key of the program, per line."""
  target = plan.options.target
  environment = _PATHWAYS_ENVIRONMENTS[target] if plan.pathways else _TPU_ENVIRONMENT
  words = [f"exec {environment}python -m trainer", *map(shlex.quote, plan.words)]
  inner = " \\\n    ".join(map(_in_double_quotes, words))
  program = _COMMANDS[target] + ("-pathways" if plan.pathways and target == "xpk" else "")
  return " \\\n  ".join([program, *options, f'--command="{inner}"']) + "\n"


def _in_double_quotes(text: str) -> str:
  """`text` as a part of a shell word in double quotes. Raises ConfigError for what has no spelling there."""
  if "\n" in text or "!" in text:
    raise ConfigError(f"{text!r}: an interactive shell cannot pass ! or a line break.\nPut the key into the YAML file.")
  return re.sub(r'([\\"$`])', r"\\\1", text)


def _fill(node: Any, value: Callable[[str], Any]) -> Any:
  """`node` with values for $name. None: it has a name without a value, or has lost all its entries by this."""
  if isinstance(node, dict):
    filled = {key: found for key, part in node.items() if (found := _fill(part, value)) is not None}
    return filled if filled or not node else None
  if isinstance(node, list):
    items = [found for part in node if (found := _fill(part, value)) is not None]
    return items if items or not node else None
  names = re.findall(r"\$(\w+)", node) if isinstance(node, str) else []
  if any(value(name) is None for name in names):
    return None
  if names and node == f"${names[0]}":
    return value(names[0])
  return re.sub(r"\$(\w+)", lambda match: str(value(match[1])), node) if names else node


def _values(plan: GkePlan) -> Callable[[str], Any]:
  """Returns a function that gives the value of a name in the templates, or None if it has no value.

  if_NAME: an empty text, for a word that stands only under this condition.
  """
  given, ramdisk, volumes = plan.options, plan.ramdisk_mebibytes, _volumes(plan)
  slice_restarts = plan.max_slice_restarts if given.elastic_slices else None
  worker_restarts = _WORKER_RESTARTS if slice_restarts is None else slice_restarts
  memory = _CONTROLLER_BYTES + 2 * budget.checkpoint_bytes(plan.config) + ramdisk * budget.MEBIBYTE
  is_long = plan.grace_seconds > budget.DEFAULT_GRACE_SECONDS
  output, version = plan.config.run.base_output_directory, given.pathways_version
  computed = {
    "command": "exec python -m trainer " + shlex.join(plan.words),  # with exec the program itself receives SIGTERM
    "long_grace": plan.grace_seconds if is_long else None,
    "grace_period": f"{plan.grace_seconds}s" if is_long else None,
    "elastic_slices": given.elastic_slices or None,
    "slice_restarts": slice_restarts,
    "worker_restarts": worker_restarts * plan.slice.hosts,
    "restarts_if_any": plan.max_restarts or None,
    "restart_codes": None if plan.pathways else _RESTART_ON,
    "controller_memory": f"{math.ceil(memory / 1e9)}G",
    "pathways_folder": given.pathways_gcs_location or output,
    "server_image": f"{_IMAGES}/server:{version or 'latest'}",
    "proxy_image": f"{_IMAGES}/proxy_server:{version or 'latest'}",
    "if_version": "" if version else None,
    "if_pathways": "" if plan.pathways else None,
    "if_ramdisk": "" if ramdisk else None,
    "ramdisk_size": f"{ramdisk}Mi",
    "ramdisk_name": plan.local_folder.lstrip("/"),
    "bucket": output.removeprefix("gs://").partition("/")[0],
    "cache_mount": shlex.quote(f"{given.cache_volume};{CACHE_FOLDER};rw") if given.cache_volume else None,
    "mounts_bucket": "true" if (given.cache_volume or "").startswith("gs://") else None,
    "mounts": [{"name": name, "mountPath": path} for name, path, _ in volumes] or None,
    "volumes": [{"name": name, **source} for name, _, source in volumes] or None,
  }
  sources = (plan, plan.slice, given)

  def value(name: str) -> Any:
    return computed[name] if name in computed else next(getattr(part, name) for part in sources if hasattr(part, name))

  return value


def _volumes(plan: GkePlan) -> list[tuple[str, str, dict[str, Any]]]:
  """(name, mount point, source) of each volume."""
  found: list[tuple[str, str, dict[str, Any]]] = []
  volume = plan.options.cache_volume or ""
  if volume.startswith("gs://"):
    attributes = {"bucketName": volume.removeprefix("gs://"), "mountOptions": f"implicit-dirs,uid={_USER},gid={_USER}"}
    csi = {"driver": "gcsfuse.csi.storage.gke.io", "volumeAttributes": attributes}
    found.append(("compilation-cache", CACHE_FOLDER, {"csi": csi}))
  elif volume:
    found.append(("compilation-cache", CACHE_FOLDER, {"persistentVolumeClaim": {"claimName": volume}}))
  if plan.ramdisk_mebibytes and plan.ramdisk == "csi":
    found.append(("ramdisk", plan.local_folder, {"csi": {"driver": "multitier-checkpoint.csi.storage.gke.io"}}))
  elif plan.ramdisk_mebibytes:
    memory = {"medium": "Memory", "sizeLimit": f"{plan.ramdisk_mebibytes}Mi"}
    found.append(("ramdisk", plan.local_folder, {"emptyDir": memory}))
  return found
