"""Parts of YAML that several kinds of jobs share: the container of the program, its volumes, and failure policies."""

from __future__ import annotations

import math
from typing import Any

import yaml

from trainer.launch.manifest import budget
from trainer.launch.manifest.job import CACHE_FOLDER, Job

Node = dict[str, Any]

CONTAINER = "trainer"
# Exit codes after which a restart would fail in the same way (README.md); 126 and 127 are the shell's, for a
# program that cannot be started.
NEVER_RESTART = (1, 2, 126, 127, 130)
_CACHE, _RAMDISK = "compilation-cache", "ramdisk"
_USER = 1000  # of docker/Dockerfile
_CONTROLLER_BYTES = 16e9  # of the program itself; two copies of the state come on top, while a checkpoint is written


def document(job: Job, node: Node) -> str:
  """The YAML of the job, after comments: how to reach the cluster, and the assumptions behind the numbers.

  A csi ramdisk needs a CheckpointConfiguration in the cluster, which comes first, as a document of its own.
  """
  given = job.options
  comments = list(job.summary)
  if given.cluster:
    place = {"location": given.zone, "project": given.project}
    words = [f"--{name} {value}" for name, value in place.items() if value]
    comments.insert(0, " ".join(["gcloud container clusters get-credentials", given.cluster, *words]))
  needs_ramdisk = job.ramdisk_mebibytes and job.ramdisk == "csi"
  nodes = [_checkpoint_configuration(job), node] if needs_ramdisk else [node]
  texts = [yaml.safe_dump(node, sort_keys=False, width=118) for node in nodes]
  return "".join(f"# {line}\n" for line in comments) + "---\n".join(texts)


def metadata(job: Job) -> Node:
  """Name and labels of the job."""
  labels = {"kueue.x-k8s.io/queue-name": job.options.queue} if job.options.queue else {}
  return {"name": job.name, **({"labels": labels} if labels else {})}


def container(job: Job, name: str, **more: Any) -> Node:
  """The container of the program. more: further fields, such as env and resources."""
  return {
    "name": name,
    "image": job.options.image,
    "imagePullPolicy": "Always",
    "command": ["bash", "-c", job.command],
    **more,
    **({"volumeMounts": mounts} if (mounts := _mounts(job)) else {}),
  }


def pod(job: Job, containers: list[Node], **more: Any) -> Node:
  """The pod template around the container of the program. more: further fields of the pod's spec."""
  annotations = {"gke-gcsfuse/volumes": "true"} if (job.options.cache_volume or "").startswith("gs://") else {}
  spec = {
    "restartPolicy": "Never",
    "terminationGracePeriodSeconds": job.grace_seconds,
    **({"serviceAccountName": job.options.service_account} if job.options.service_account else {}),
    "securityContext": {"fsGroup": _USER},  # so that the image's user can write to volumes
    **more,
    "containers": containers,
    **({"volumes": volumes} if (volumes := _volumes(job)) else {}),
  }
  return {**({"metadata": {"annotations": annotations}} if annotations else {}), "spec": spec}


def failure_policy(job: Job) -> Node:
  """Of the JobSet: restarts, but not after an exit code of NEVER_RESTART."""
  never = {"name": "neverRestart", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
  return {"maxRestarts": job.max_restarts, "restartStrategy": "Recreate", "rules": [never]}


def pod_failure_policy() -> Node:
  """Of the Job whose pods run the program: fails with the reason that `failure_policy` looks for."""
  codes = {"containerName": CONTAINER, "operator": "In", "values": list(NEVER_RESTART)}
  return {"rules": [{"action": "FailJob", "onExitCodes": codes}]}


def controller_resources(job: Job) -> Node:
  """Requests of the controller behind Pathways. No limit: the estimate must not end a run."""
  size = _CONTROLLER_BYTES + 2 * budget.checkpoint_bytes(job.config) + job.ramdisk_mebibytes * budget.MEBIBYTE
  return {"requests": {"cpu": "24", "memory": f"{math.ceil(size / 1e9)}G"}}


def _mounts(job: Job) -> list[Node]:
  found = []
  if job.options.cache_volume:
    found.append({"name": _CACHE, "mountPath": CACHE_FOLDER})
  if job.ramdisk_mebibytes:
    found.append({"name": _RAMDISK, "mountPath": job.local_folder})
  return found


def _volumes(job: Job) -> list[Node]:
  found = []
  if job.options.cache_volume:
    found.append({"name": _CACHE, **_cache_source(job.options.cache_volume)})
  if job.ramdisk_mebibytes and job.ramdisk == "csi":
    found.append({"name": _RAMDISK, "csi": {"driver": "multitier-checkpoint.csi.storage.gke.io"}})
  elif job.ramdisk_mebibytes:
    found.append({"name": _RAMDISK, "emptyDir": {"medium": "Memory", "sizeLimit": f"{job.ramdisk_mebibytes}Mi"}})
  return found


def _cache_source(volume: str) -> Node:
  if volume.startswith("gs://"):
    attributes = {"bucketName": volume.removeprefix("gs://"), "mountOptions": f"implicit-dirs,uid={_USER},gid={_USER}"}
    return {"csi": {"driver": "gcsfuse.csi.storage.gke.io", "volumeAttributes": attributes}}
  return {"persistentVolumeClaim": {"claimName": volume}}


def _checkpoint_configuration(job: Job) -> Node:
  """The size of the ramdisks, and the nodes that have them."""
  bucket = job.config.run.base_output_directory.removeprefix("gs://").partition("/")[0]
  return {
    "apiVersion": "checkpointing.gke.io/v1",
    "kind": "CheckpointConfiguration",
    "metadata": {"name": f"{job.name}-ramdisk"},
    "spec": {
      "cloudStorageBucketName": bucket,
      "nodeSelector": {"node.kubernetes.io/instance-type": job.slice.machine_type},
      "tolerations": [{"key": "google.com/tpu", "operator": "Exists", "effect": "NoSchedule"}],
      "inMemoryVolumeSize": f"{job.ramdisk_mebibytes}Mi",
    },
  }
