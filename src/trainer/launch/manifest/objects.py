"""JobSets, PathwaysJobs and RayJobs: the templates of templates.yml with the values of a plan."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from trainer.launch.manifest import budget
from trainer.launch.manifest.plan import CACHE_FOLDER, GkePlan

_USER = 1000  # of docker/Dockerfile
_CONTROLLER_BYTES = 16e9  # of the program itself; two copies of the state come on top, while a checkpoint is written
_WORKER_RESTARTS = 4  # of each host of a slice, if the job is not elastic


def render(plan: GkePlan) -> str:
  """The YAML, after comments: how to reach the cluster, and the assumptions behind the numbers.

  A csi ramdisk needs a CheckpointConfiguration in the cluster, which comes first, as a document of its own.
  """
  target = plan.options.target
  comments = plan.summary
  if plan.options.cluster:
    place = {"location": plan.options.zone, "project": plan.options.project}
    words = [f"--{name} {value}" for name, value in place.items() if value]
    comments = [" ".join(["gcloud container clusters get-credentials", plan.options.cluster, *words]), *comments]
  if target == "pathwaysjob":
    remark = "A PathwaysJob restarts after every exit code except 0, also after 1 and 2. A jobset does not."
    comments = [remark, *comments]
  kinds = ["CheckpointConfiguration"] if plan.ramdisk_mebibytes and plan.ramdisk == "csi" else []
  kinds.append("jobset behind Pathways" if target == "jobset" and plan.pathways else target)
  templates = yaml.safe_load(Path(__file__).with_name("templates.yml").read_text())
  filled = [_fill(templates[kind], _values(plan)) for kind in kinds]
  texts = [yaml.safe_dump(node, sort_keys=False, width=118) for node in filled]
  return "".join(f"# {line}\n" for line in comments) + "---\n".join(texts)


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
  """Returns a function that gives the value of a name in the templates, or None if it has no value."""
  memory = _CONTROLLER_BYTES + 2 * budget.checkpoint_bytes(plan.config) + plan.ramdisk_mebibytes * budget.MEBIBYTE
  restarts = _WORKER_RESTARTS if plan.slice_restarts is None else plan.slice_restarts
  volumes = _volumes(plan)
  computed = {
    "ray_command": _ray_command(plan),
    "grace_text": str(plan.grace_seconds),
    "chips_text": str(plan.slice.chips_per_host),
    "worker_restarts": restarts * plan.slice.hosts,
    "controller_memory": f"{math.ceil(memory / 1e9)}G",
    "bucket": plan.config.run.base_output_directory.removeprefix("gs://").partition("/")[0],
    "mounts_bucket": "true" if (plan.options.cache_volume or "").startswith("gs://") else None,
    "mounts": [{"name": name, "mountPath": path} for name, path, _ in volumes] or None,
    "volumes": [{"name": name, **source} for name, _, source in volumes] or None,
    "ramdisk_size": f"{plan.ramdisk_mebibytes}Mi",
  }
  sources = (plan, plan.slice, plan.options)

  def value(name: str) -> Any:
    return computed[name] if name in computed else next(getattr(part, name) for part in sources if hasattr(part, name))

  return value


def _ray_command(plan: GkePlan) -> str:
  arguments = [*plan.words, f"--min-slices={plan.least_slices}", f"--max-slices={plan.num_slices}"]
  arguments += [f"--topology={plan.slice.topology}", f"--accelerator-type={plan.slice.ray_version}"]
  arguments += ["--replace-lost"] if plan.slice.hosts == 1 else []
  return "python -m trainer.launch.ray " + shlex.join(arguments)


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
