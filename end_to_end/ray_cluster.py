"""A Ray cluster on this machine, whose nodes claim to be TPU hosts of 8 chips. For tests: `python -m ...ray_cluster N`.

Prints the address of the cluster. Every line on stdin changes it: "add" adds a host, "remove" kills the newest one. The
cluster ends with stdin.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from typing import Any

from ray.cluster_utils import Cluster

STORE_BYTES = 80 << 20
TPU_HOST = {"TPU": 8, "accelerator_type:TPU-V6E": 1, "TPU-v6e-8-head": 1}


def main() -> None:
  folder = tempfile.mkdtemp(prefix="ray-")  # short: sockets are in it
  head = {"num_cpus": 1, "object_store_memory": STORE_BYTES, "include_dashboard": False, "temp_dir": folder}
  cluster = Cluster(initialize_head=True, head_node_args=head)
  hosts = [add(cluster, number) for number in range(int(sys.argv[1]))]
  print(cluster.address, flush=True)
  for line in sys.stdin:
    if line.strip() == "add":
      hosts.append(add(cluster, len(hosts)))
    else:
      cluster.remove_node(hosts.pop(), allow_graceful=False)
    print(line.strip(), flush=True)
  cluster.shutdown()
  shutil.rmtree(folder, ignore_errors=True)


def add(cluster: Cluster, number: int) -> Any:
  """Adds a host that is a slice of its own."""
  labels = {
    "ray.io/tpu-pod-type": "v6e-8",
    "ray.io/tpu-topology": "2x4",
    "ray.io/tpu-worker-id": "0",
    "ray.io/tpu-slice-name": f"slice-{number}",
    "ray.io/accelerator-type": "TPU-V6E",
  }
  return cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES, resources=dict(TPU_HOST), labels=labels)


if __name__ == "__main__":
  main()
