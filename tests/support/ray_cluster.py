"""A Ray cluster on this machine, whose nodes claim to be TPU hosts: `python -m tests.support.ray_cluster SLICES HOSTS`.

HOSTS of a slice: 1 (v6e, 2x4) or 2 (v4, 2x2x2). Prints the address of the cluster. Every line on stdin changes it:
"add" adds a slice, "remove" kills the newest host. The cluster ends with stdin.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from typing import Any

from ray.cluster_utils import Cluster

STORE_BYTES = 80 << 20
# hosts of a slice -> (Ray's name of the TPU, its topology, Ray's name of the slice, chips of a host)
KINDS = {1: ("TPU-V6E", "2x4", "v6e-8", 8), 2: ("TPU-V4", "2x2x2", "v4-16", 4)}


def main() -> None:
  folder = tempfile.mkdtemp(prefix="ray-")  # short: sockets are in it
  # Not the option temp_dir: Cluster writes the address to Ray's default folder, which it does not make then.
  os.environ["RAY_TMPDIR"] = folder
  cluster = Cluster()
  cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES, include_dashboard=False)
  slices, hosts_each = map(int, sys.argv[1:])
  hosts = [host for number in range(slices) for host in add(cluster, number, hosts_each)]
  print(cluster.address, flush=True)
  for line in sys.stdin:
    if line.strip() == "add":
      hosts += add(cluster, len(hosts), hosts_each)
    else:
      cluster.remove_node(hosts.pop(), allow_graceful=False)
    print(line.strip(), flush=True)
  cluster.shutdown()
  shutil.rmtree(folder, ignore_errors=True)


def add(cluster: Cluster, number: int, hosts: int) -> list[Any]:
  """Adds the hosts of one slice."""
  accelerator, topology, pod_type, chips = KINDS[hosts]
  added = []
  for worker in range(hosts):
    resources = {"TPU": chips, f"accelerator_type:{accelerator}": 1}
    if worker == 0:
      resources[f"TPU-{pod_type}-head"] = 1
    labels = {
      "ray.io/tpu-pod-type": pod_type,
      "ray.io/tpu-topology": topology,
      "ray.io/tpu-worker-id": str(worker),
      "ray.io/tpu-slice-name": f"slice-{number}",
      "ray.io/accelerator-type": accelerator,
    }
    environment = {"TPU_NAME": f"slice-{number}"}  # from which Ray takes the name of a slice of several hosts
    of_node = {"resources": resources, "labels": labels, "env_vars": environment}
    added.append(cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES, **of_node))
  return added


if __name__ == "__main__":
  main()
