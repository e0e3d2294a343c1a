"""PathwaysJobs: the controller of this kind makes the JobSet and the Pathways servers itself."""

from __future__ import annotations

from trainer.launch.manifest import pods
from trainer.launch.manifest.job import Job
from trainer.launch.manifest.pods import Node


def render(job: Job) -> str:
  """The YAML."""
  # The PathwaysJob controller gives this container the environment of Pathways.
  program = pods.container(job, "main", resources=pods.controller_resources(job))
  worker: Node = {"type": job.slice.machine_type, "topology": job.slice.topology, "numSlices": job.num_slices}
  controller: Node = {"deploymentMode": "default", "template": pods.pod(job, [program])}
  if job.options.elastic_slices:
    worker["maxSliceRestarts"] = job.max_slice_restarts
    controller["elasticSlices"] = job.options.elastic_slices
  node = {
    "apiVersion": "pathways-job.pathways.domain/v1",
    "kind": "PathwaysJob",
    "metadata": pods.metadata(job),
    "spec": {
      "maxRestarts": job.max_restarts,
      "workers": [worker],
      "pathwaysDir": job.pathways_folder,
      **pods.given(pathwaysVersion=job.options.pathways_version),
      "controller": controller,
    },
  }
  remark = "# A PathwaysJob restarts after every exit code except 0, also after 1 and 2. A jobset does not.\n"
  return remark + pods.document(job, node)
