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
_USER = 1000  # of docker/Dockerfile
_CONTROLLER_BYTES = 16e9  # of the program itself; two copies of the state come on top, while a checkpoint is written


def document(job: Job, node: Node) -> str:
  """The YAML of the job, after comments: how to reach the cluster, and the assumptions behind the numbers.

  A csi ramdisk needs a CheckpointConfiguration in the cluster, which comes first, as a document of its own.
  """
  comments = job.summary
  if job.options.cluster:
    place = given(location=job.options.zone, project=job.options.project)
    words = [f"--{name} {value}" for name, value in place.items()]
    comments = [" ".join(["gcloud container clusters get-credentials", job.options.cluster, *words]), *comments]
  needs_ramdisk = job.ramdisk_mebibytes and job.ramdisk == "csi"
  nodes = [_checkpoint_configuration(job), node] if needs_ramdisk else [node]
  texts = [yaml.safe_dump(node, sort_keys=False, width=118) for node in nodes]
  return "".join(f"# {line}\n" for line in comments) + "---\n".join(texts)


def metadata(job: Job) -> Node:
  """Name and labels of the job."""
  labels = {"kueue.x-k8s.io/queue-name": job.options.queue} if job.options.queue else {}
  return {"name": job.name, **given(labels=labels)}


def given(**fields: Any) -> Node:
  """The fields that have a value."""
  return {name: value for name, value in fields.items() if value}


def container(job: Job, name: str, **more: Any) -> Node:
  """The container of the program. more: further fields, such as env and resources."""
  return {
    "name": name,
    "image": job.options.image,
    "imagePullPolicy": "Always",
    "command": ["bash", "-c", job.command],
    **more,
    **given(volumeMounts=[{"name": name, "mountPath": path} for name, path, _ in _volumes(job)]),
  }


def pod(job: Job, containers: list[Node], **more: Any) -> Node:
  """The pod template around the container of the program. more: further fields of the pod's spec."""
  annotations = {"gke-gcsfuse/volumes": "true"} if (job.options.cache_volume or "").startswith("gs://") else {}
  spec = {
    "restartPolicy": "Never",
    "terminationGracePeriodSeconds": job.grace_seconds,
    **given(serviceAccountName=job.options.service_account),
    "securityContext": {"fsGroup": _USER},  # so that the image's user can write to volumes
    **more,
    "containers": containers,
    **given(volumes=[{"name": name, **source} for name, _, source in _volumes(job)]),
  }
  return {**given(metadata=given(annotations=annotations)), "spec": spec}


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


def _volumes(job: Job) -> list[tuple[str, str, Node]]:
  """(name, mount point, source) of each volume."""
  found = []
  if job.options.cache_volume:
    found.append(("compilation-cache", CACHE_FOLDER, _cache_source(job.options.cache_volume)))
  if job.ramdisk_mebibytes:
    csi = {"csi": {"driver": "multitier-checkpoint.csi.storage.gke.io"}}
    memory = {"emptyDir": {"medium": "Memory", "sizeLimit": f"{job.ramdisk_mebibytes}Mi"}}
    found.append(("ramdisk", job.local_folder, csi if job.ramdisk == "csi" else memory))
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
