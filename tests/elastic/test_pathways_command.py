"""The real command with a stand-in for Pathways that it starts for itself."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from tests.support import command
from tests.support.command import Run

from pathways_standin.process import control_path, send

STEPS, HANG = 60, 50
KEYS = (
  f"dataset_type=synthetic vocab_size=64 opt_type=sgd steps={STEPS} cluster=pathways num_slices=3 "
  "cluster_standin=3x1 elastic_enabled=true elastic_min_slice_count=1 "
  f"snapshot_period=1 fault_injection=hang@{HANG}:1/inf"
).split()


def children(pid: int, word: str) -> list[int]:
  """The children of a process whose command contains the word, in the order of their start."""
  found = [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]
  return sorted(child for child in found if word.encode() in Path(f"/proc/{child}/cmdline").read_bytes())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_neither_a_lost_slice_nor_a_slice_that_hangs_to_the_end_costs_the_run(tmp_path, server):
  """A slice is lost during a step. Later copies of snapshots never arrive, and threads wait for them to the end.

  Of the steps for fewer slices, the step without the first living slice is the first that is prepared: the slices are
  lost in this order, so that no other step is compiled.
  """
  run = Run(tmp_path, KEYS, server.start)
  process = run.start()
  assert command.wait_until(process, lambda: run.last_step >= 2), run.printed[-4000:]
  (standin,) = children(process.pid, "pathways_standin")
  port = re.search(r"pathways_standin.control --port (\d+)", run.printed)[1]
  send(control_path(f"127.0.0.1:{port}"), ["kill", "0"])
  assert process.wait(240) == 0, run.printed[-4000:]
  killed, hung = run.events("slice_down")
  assert killed["slice"] == [0] and killed["step"] < HANG - 2, "killed too late"
  assert hung["slice"] == [1] and "do not answer" in hung["error"] and len(run.events("hang")) == 1
  for recovery, left in zip(run.events("recovery"), (2, 1), strict=True):
    assert recovery["tier"] == "snapshot" and recovery["steps_lost"] <= 1 and recovery["slices_after"] == left
    assert recovery["detect_seconds"] < 60, "waited for the copy of a snapshot on the hanging slice"
  # A step that is repeated without a slice adds the same gradients in another order.
  losses: dict[int, float] = {}
  for record in run.records("metrics"):
    if "loss" in record:
      assert losses.setdefault(record["step"], record["loss"]) == pytest.approx(record["loss"], rel=1e-5)
  assert list(losses) == list(range(1, STEPS + 1))
  end = time.monotonic() + 20
  while command.is_running(standin):
    assert time.monotonic() < end, "the stand-in has outlived the run"
    time.sleep(0.05)
