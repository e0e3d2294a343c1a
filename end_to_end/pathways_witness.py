"""Runs Google's own elastic loop against the stand-in for Pathways: a witness that the stand-in is faithful.

  python -m end_to_end.pathways_witness

Nothing of this project is on the client's side, except for the stand-in's commands. pathwaysutils' Manager
(elastic_retry, wait_for_slices, the thread that looks for returned slices), its model and training loop
(pathwaysutils.extras.simple_model) and Orbax's Snapshotter for Pathways are used as they are installed. A slice is
killed and later revived. The loop must continue from its snapshot on the remaining slices, grow again, and complete.
Then a slice is killed and replaced on a fixed mesh.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

from pathways_standin.process import send, start_standin

STEPS, KILL_AFTER, REVIVE_AFTER = 16, 4, 8
SLICES = 3


def main() -> int:
  """Starts the stand-in and the client, and checks what the client reports."""
  if sys.argv[1:2] == ["client"]:
    return client(sys.argv[2], int(sys.argv[3]))
  for minimum, expected in ((SLICES - 1, [[0, 1, 2], [0, 2], [0, 1, 2]]), (SLICES, [[0, 1, 2], [0, 1, 2]])):
    server = start_standin(SLICES, 2)
    try:
      environment = os.environ | {
        "JAX_PLATFORMS": "proxy",
        "JAX_BACKEND_TARGET": server.address,
        "IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS": "true",
      }
      command = [sys.executable, "-m", "end_to_end.pathways_witness", "client", server.control_path, str(minimum)]
      done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=900, check=True)
    finally:
      server.close()
    found = json.loads(done.stdout.splitlines()[-1])
    print(f"at least {minimum} slices: {json.dumps(found)}", flush=True)
    assert found["slices"] == expected, f"expected {expected}"
    assert found["steps"] == STEPS and found["finite"]
    assert found["steps_repeated"] <= 1
  return 0


def client(control: str, minimum: int) -> int:
  """Trains with pathwaysutils, and prints what happened as one line of JSON."""
  import math

  import orbax.checkpoint as ocp
  import pathwaysutils

  pathwaysutils.initialize()
  from pathwaysutils.elastic import manager as manager_lib
  from pathwaysutils.extras.simple_model import config as config_lib
  from pathwaysutils.extras.simple_model.workload import Workload

  config = config_lib.ModelConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_heads=4,
    head_dim=8,
    num_layers=1,
    per_device_batch_size=2,
    seq_len=8,
  )
  manager = manager_lib.Manager()
  snapshotter = ocp.v1.training.pathways.Snapshotter()
  attempts: list[list[int]] = []
  steps: list[int] = []
  losses: list[float] = []
  faults = {KILL_AFTER: ["kill", "1"], REVIVE_AFTER: ["revive", "1"]}
  if minimum == SLICES:  # nobody computes until the slice is back
    faults = {KILL_AFTER: ["kill", "1"]}

  def on_event() -> None:
    if minimum == SLICES and len(attempts) == 1:
      send(control, ["revive", "1"])

  @manager.elastic_retry(
    minimum_slice_count=minimum,
    poll_interval=0.5,
    timeout=120,
    on_elastic_event_callback=on_event,
    retry_policy=manager_lib.ElasticRetryLimit(4),
  )
  def train() -> None:
    attempts.append(sorted(manager.active_slice_indices))
    workload = Workload(
      config, elastic_manager=manager, total_steps=STEPS, snapshot_interval=1, snapshotter=snapshotter
    )
    workload.initialize()
    if snapshotter.latest is not None:
      last = snapshotter.latest.step
      workload.restore_from_snapshot()
      workload.step = last + 1
    while workload.step <= STEPS:
      losses.append(workload.run_step())
      snapshotter.join()
      steps.append(workload.step - 1)
      if (fault := faults.pop(steps[-1], None)) is not None:
        send(control, fault)
      end = time.monotonic() + 60  # the thread looks for returned slices every half second
      while steps[-1] > REVIVE_AFTER and len(attempts) == 2 and minimum < SLICES and time.monotonic() < end:
        if manager.available_inactive_slices:
          raise manager_lib.ScaleUpSignalError
        time.sleep(0.05)
    workload.close()

  train()
  summary: dict[str, Any] = {
    "slices": attempts,
    "steps": len(set(steps)),
    "steps_repeated": len(steps) - len(set(steps)),
    "finite": all(map(math.isfinite, losses)),
    "losses": [round(loss, 3) for loss in losses],
  }
  print(json.dumps(summary))
  return 0


if __name__ == "__main__":
  sys.exit(main())
