"""The real command with a stand-in for Pathways that it starts for itself."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from end_to_end import command
from end_to_end.command import Run

KEYS = (
  "dataset_type=synthetic vocab_size=64 steps=12 cluster=pathways cluster_standin=2x1 elastic_enabled=true "
  "elastic_min_slice_count=1 elastic_hang_check_seconds=1 snapshot_period=1 fault_injection=hang@6:1/inf"
).split()


def stand_ins(pid: int) -> list[int]:
  """The stand-ins among the children of a process."""
  children = [int(word) for path in Path(f"/proc/{pid}/task").glob("*/children") for word in path.read_text().split()]
  return [child for child in children if b"pathways_standin" in Path(f"/proc/{child}/cmdline").read_bytes()]


@pytest.mark.timeout(600)
def test_a_slice_that_hangs_to_the_end_costs_neither_the_run_nor_its_exit_code(tmp_path):
  """Copies of snapshots on the slice never arrive, and threads of the run wait for it to the end."""
  run = Run(tmp_path, KEYS)
  process = run.start()
  assert command.wait_until(process, lambda: run.last_step >= 2), run.printed[-4000:]
  (server,) = stand_ins(process.pid)
  assert process.wait(240) == 0, run.printed[-4000:]
  (down,) = run.events("slice_down")
  assert down["slice"] == [1] and "do not answer" in down["error"] and len(run.events("hang")) == 1
  (recovery,) = run.events("recovery")
  assert recovery["tier"] == "snapshot" and recovery["steps_lost"] <= 1 and recovery["slices_after"] == 1
  assert recovery["detect_seconds"] < 60, "waited for the copy of a snapshot on the hanging slice"
  assert list(run.losses()) == list(range(1, 13))
  end = time.monotonic() + 20
  while Path(f"/proc/{server}").exists():
    assert time.monotonic() < end, "the stand-in has outlived the run"
    time.sleep(0.05)
