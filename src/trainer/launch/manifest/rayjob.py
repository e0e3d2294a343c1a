"""RayJobs: KubeRay makes a Ray cluster with one worker per TPU host, and trainer.launch.ray starts in its head."""

from __future__ import annotations

import shlex

from trainer.launch.manifest import pods
from trainer.launch.manifest.job import Job
from trainer.launch.manifest.pods import Node

# The job is submitted through the dashboard's port.
_PORTS = {"gcs": 6379, "dashboard": 8265, "client": 10001}


def render(job: Job) -> str:
  """The YAML."""
  arguments = [*job.words, f"--min-slices={job.least_slices}", f"--max-slices={job.num_slices}"]
  arguments += [f"--topology={job.slice.topology}", f"--accelerator-type={job.slice.ray_version}"]
  if job.slice.hosts == 1:
    arguments.append("--replace-lost")
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
        # KubeRay replaces lost pods. An autoscaler would remove the hosts of a slice that waits.
        "enableInTreeAutoscaling": False,
        # Without CPUs of its own, no worker is placed on the head.
        "headGroupSpec": {"rayStartParams": {"dashboard-host": "0.0.0.0", "num-cpus": "0"}, "template": _head(job)},
        "workerGroupSpecs": [_workers(job)],
      },
    },
  }
  return pods.document(job, node)


def _ray(job: Job, name: str, **more: object) -> Node:
  """A container in which KubeRay starts Ray: without a command of ours."""
  return {key: value for key, value in pods.container(job, name, **more).items() if key != "command"}


def _head(job: Job) -> Node:
  """It starts the run and supervises it, and needs no volume."""
  container = _ray(
    job,
    "ray-head",
    # `ray job stop` sends SIGTERM, and SIGKILL after this time, in which the workers save.
    env=[{"name": "RAY_JOB_STOP_WAIT_TIME_S", "value": str(job.grace_seconds)}],
    ports=[{"name": name, "containerPort": port} for name, port in _PORTS.items()],
    resources={"requests": {"cpu": "8", "memory": "32G"}},
  )
  container.pop("volumeMounts", None)
  template = pods.pod(job, [container])
  template["spec"].pop("volumes", None)
  return template


def _workers(job: Job) -> Node:
  host = {"name": "NODE_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}}
  # Without TPUs the program must fail, not train on the CPU.
  platforms = {"name": "JAX_PLATFORMS", "value": "tpu,cpu"}
  container = _ray(
    job,
    "ray-worker",
    env=[host, {"name": "VBAR_CONTROL_SERVICE_URL", "value": "$(NODE_IP):8353"}, platforms],
    securityContext={"privileged": True, "runAsUser": 0},
    resources={"limits": {"google.com/tpu": str(job.slice.chips_per_host)}},
  )
  selector = {
    "cloud.google.com/gke-tpu-accelerator": job.slice.accelerator,
    "cloud.google.com/gke-tpu-topology": job.slice.topology,
  }
  return {
    "groupName": "tpu-slices",
    "replicas": job.num_slices,
    "minReplicas": job.least_slices,
    "maxReplicas": job.num_slices,
    "numOfHosts": job.slice.hosts,
    "rayStartParams": {},
    "template": pods.pod(job, [container], nodeSelector=selector),
  }
