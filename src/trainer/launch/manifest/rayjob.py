"""RayJobs: KubeRay makes a Ray cluster with one worker per TPU host, and trainer.launch.ray starts in its head."""

from __future__ import annotations

import shlex

from trainer.launch.manifest import pods
from trainer.launch.manifest.hardware import CHIPS_PER_HOST
from trainer.launch.manifest.job import Job
from trainer.launch.manifest.pods import Node

_PORTS = ({"name": "gcs", "containerPort": 6379}, {"name": "client", "containerPort": 10001})


def render(job: Job) -> str:
  """The YAML."""
  least = job.num_slices - job.options.elastic_slices
  arguments = [*job.words, f"--min-slices={least}", f"--max-slices={job.num_slices}"]
  arguments += [f"--topology={job.slice.topology}", f"--accelerator-type={job.slice.ray_version}"]
  node = {
    "apiVersion": "ray.io/v1",
    "kind": "RayJob",
    "metadata": pods.metadata(job),
    "spec": {
      "entrypoint": "python -m trainer.launch.ray " + shlex.join(arguments),
      # A retry would make another Ray cluster, also after exit codes 1 and 2. Ray Train restarts workers itself.
      "backoffLimit": 0,
      "shutdownAfterJobFinishes": True,
      "rayClusterSpec": {
        "enableInTreeAutoscaling": least < job.num_slices,
        "headGroupSpec": {"rayStartParams": {}, "template": _head(job)},
        "workerGroupSpecs": [_workers(job, least)],
      },
    },
  }
  return pods.document(job, node)


def _ray(job: Job, name: str, **more: object) -> Node:
  """A container in which KubeRay starts Ray: without a command of ours."""
  return {key: value for key, value in pods.container(job, name, **more).items() if key != "command"}


def _head(job: Job) -> Node:
  container = _ray(job, "ray-head", ports=list(_PORTS), resources={"requests": {"cpu": "8", "memory": "32G"}})
  return pods.pod(job, [container])


def _workers(job: Job, least: int) -> Node:
  host = {"name": "NODE_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}}
  container = _ray(
    job,
    "ray-worker",
    env=[host, {"name": "VBAR_CONTROL_SERVICE_URL", "value": "$(NODE_IP):8353"}],
    ports=[{"name": "mxla", "containerPort": 8081}],
    securityContext={"privileged": True, "runAsUser": 0},
    resources={"limits": {"google.com/tpu": str(CHIPS_PER_HOST)}},
  )
  selector = {
    "cloud.google.com/gke-tpu-accelerator": job.slice.accelerator,
    "cloud.google.com/gke-tpu-topology": job.slice.topology,
  }
  return {
    "groupName": "tpu-slices",
    "replicas": job.num_slices,
    "minReplicas": least,
    "maxReplicas": job.num_slices,
    "numOfHosts": job.slice.hosts,
    "rayStartParams": {},
    "template": pods.pod(job, [container], nodeSelector=selector),
  }
