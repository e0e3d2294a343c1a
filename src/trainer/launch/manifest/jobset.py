"""JobSets: one controller behind Pathways and the Pathways servers, or a process of the program on every TPU host."""

from __future__ import annotations

from typing import Any

from trainer.launch.manifest import pods
from trainer.launch.manifest.hardware import CHIPS_PER_HOST
from trainer.launch.manifest.job import Job
from trainer.launch.manifest.pods import Node

_PROXY_PORT, _MANAGER_PORT, _WORKER_PORT = 29000, 29001, 29005
_MANAGER = f"--resource_manager_address=$(PATHWAYS_HEAD):{_MANAGER_PORT}"
_HEAD = "pathways-head"
_ONE_SLICE_PER_NODE_POOL = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
_WORKER_RESTARTS = 4  # of each host of a slice, if the job is not elastic
_SECONDS_AFTER_END = 12 * 3600  # in which the finished job and its logs can be looked at


def render(job: Job) -> str:
  """The YAML."""
  return pods.document(job, _pathways(job) if job.pathways else _multi_controller(job))


def _jobset(job: Job, annotations: dict[str, str], spec: Node) -> Node:
  metadata = pods.metadata(job) | pods.given(annotations=annotations)
  common = {
    "ttlSecondsAfterFinished": _SECONDS_AFTER_END,
    "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
    "failurePolicy": pods.failure_policy(job),
  }
  return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata, "spec": common | spec}


def _replicated_job(name: str, replicas: int, pods_each: int, template: Node, **more: Any) -> Node:
  job = {"completionMode": "Indexed", "completions": pods_each, "parallelism": pods_each, **more, "template": template}
  return {"name": name, "replicas": replicas, "template": {"spec": job}}


def _multi_controller(job: Job) -> Node:
  """A pod per TPU host. GKE adds TPU_WORKER_* and MEGASCALE_*, from which JAX finds its peers."""
  container = pods.container(
    job,
    pods.CONTAINER,
    # Without TPUs the program must fail, not train on the CPU.
    env=[{"name": "JAX_PLATFORMS", "value": "tpu,cpu"}],
    ports=[{"containerPort": port, "protocol": "TCP"} for port in (8471, 8080)],
    securityContext={"privileged": True, "runAsUser": 0},  # the TPU devices belong to root
    resources={"limits": {"google.com/tpu": CHIPS_PER_HOST}},
  )
  template = pods.pod(job, [container], **_on_tpu_hosts(job))
  slices = _replicated_job(
    "slice", job.num_slices, job.slice.hosts, template, backoffLimit=0, podFailurePolicy=pods.pod_failure_policy()
  )
  return _jobset(job, _ONE_SLICE_PER_NODE_POOL, {"replicatedJobs": [slices]})


def _on_tpu_hosts(job: Job) -> Node:
  return {
    "hostNetwork": True,
    "dnsPolicy": "ClusterFirstWithHostNet",
    "nodeSelector": {
      "cloud.google.com/gke-tpu-accelerator": job.slice.accelerator,
      "cloud.google.com/gke-tpu-topology": job.slice.topology,
    },
    "tolerations": [{"key": "google.com/tpu", "operator": "Exists"}],
  }


def _pathways(job: Job) -> Node:
  """The head with program, proxy and resource manager on a CPU node, and a worker on every TPU host."""
  return _jobset(
    job,
    {},
    {
      "coordinator": {"replicatedJob": _HEAD},
      "startupPolicy": {"startupPolicyOrder": "InOrder"},
      "successPolicy": {"operator": "All", "targetReplicatedJobs": [_HEAD]},
      "replicatedJobs": [_head(job), _workers(job)],
    },
  )


def _head(job: Job) -> Node:
  program = pods.container(
    job,
    pods.CONTAINER,
    env=[
      _field("PATHWAYS_HEAD", "labels", "coordinator"),
      {"name": "JAX_PLATFORMS", "value": "proxy"},
      {"name": "JAX_BACKEND_TARGET", "value": f"grpc://$(PATHWAYS_HEAD):{_PROXY_PORT}"},
      {"name": "XCLOUD_ENVIRONMENT", "value": "GCP"},
    ],
    resources=pods.controller_resources(job),
  )
  server_image, proxy_image = job.pathways_images
  elastic = [f"--num_elastic_slices={job.options.elastic_slices}"] if job.options.elastic_slices else []
  proxy = _server(
    "pathways-proxy",
    proxy_image,
    _PROXY_PORT,
    [_MANAGER, _scratch(job), *elastic],
    env=[_field("PATHWAYS_HEAD", "labels", "coordinator")],
    resources={"limits": {"cpu": "16", "memory": "100G"}},
  )
  manager = _server(
    "pathways-rm",
    server_image,
    _MANAGER_PORT,
    [
      _scratch(job),
      "--node_type=resource_manager",
      f"--instance_count={job.num_slices}",
      f"--instance_type={job.slice.instance}",
    ],
    env=[
      _field("REPLICATED_JOB_NAME", "annotations", "replicatedjob-name"),
      _field("JOBSET_NAME", "annotations", "jobset-name"),
      _field("HOST_ADDRESS", "labels", "coordinator"),
      {"name": "TPU_SKIP_MDS_QUERY", "value": "true"},
    ],
    resources={"limits": {"cpu": "8", "memory": "32G"}},
  )
  # As init containers that always restart, the servers live as long as the program and do not keep the pod alive.
  template = pods.pod(
    job,
    [program],
    hostNetwork=True,
    dnsPolicy="ClusterFirstWithHostNet",
    nodeSelector={"cloud.google.com/gke-nodepool": "cpu-np"},
    initContainers=[server | {"restartPolicy": "Always"} for server in (proxy, manager)],
  )
  return _replicated_job(_HEAD, 1, 1, template, backoffLimit=0, podFailurePolicy=pods.pod_failure_policy())


def _workers(job: Job) -> Node:
  worker = _server(
    "pathways-worker",
    job.pathways_images[0],
    _WORKER_PORT,
    [_MANAGER, _scratch(job)],
    env=[
      {"name": "TPU_MIN_LOG_LEVEL", "value": "0"},
      {"name": "TF_CPP_MIN_LOG_LEVEL", "value": "0"},
      {"name": "XCLOUD_ENVIRONMENT", "value": "GCP"},
      {"name": "MEGASCALE_GRPC_ENABLE_XOR_TRACER", "value": "false"},
      _field("MEGASCALE_NUM_SLICES", "labels", "replicatedjob-replicas"),
      _field("MEGASCALE_SLICE_ID", "labels", "job-index"),
      _field("MEGASCALE_COORDINATOR_ADDRESS", "labels", "coordinator"),
      _field("JOBSET_NAME", "annotations", "jobset-name"),
      _field("REPLICATED_JOB_NAME", "annotations", "replicatedjob-name"),
      _field("PATHWAYS_HEAD", "labels", "coordinator"),
    ],
    resources={"limits": {"google.com/tpu": CHIPS_PER_HOST}},
    volumeMounts=[{"name": "shared-tmp", "mountPath": "/tmp"}],
  )
  template = {
    "metadata": {"annotations": _ONE_SLICE_PER_NODE_POOL},
    "spec": {
      "restartPolicy": "OnFailure",
      **pods.given(serviceAccountName=job.options.service_account),
      **_on_tpu_hosts(job),
      "containers": [worker],
      "volumes": [{"name": "shared-tmp", "hostPath": {"path": "/tmp", "type": "DirectoryOrCreate"}}],
    },
  }
  restarts = job.max_slice_restarts if job.options.elastic_slices else _WORKER_RESTARTS
  return _replicated_job("worker", job.num_slices, job.slice.hosts, template, backoffLimit=restarts * job.slice.hosts)


def _server(name: str, image: str, port: int, arguments: list[str], **more: Any) -> Node:
  return {
    "name": name,
    "image": image,
    "imagePullPolicy": "Always",
    "args": [f"--server_port={port}", *arguments],
    "ports": [{"containerPort": port, "protocol": "TCP"}],
    **more,
  }


def _scratch(job: Job) -> str:
  return f"--gcs_scratch_location={job.pathways_folder}"


def _field(variable: str, kind: str, name: str) -> Node:
  """An environment variable with the value of a JobSet label or annotation of the pod."""
  path = f"metadata.{kind}['jobset.sigs.k8s.io/{name}']"
  return {"name": variable, "valueFrom": {"fieldRef": {"fieldPath": path}}}
