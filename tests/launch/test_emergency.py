"""Local copies of slices that are real processes: all processes are killed, and some copies are gone."""

from __future__ import annotations

import pytest
from tests.support.command import differences
from tests.support.torchrun_runs import OneWorker
from tests.support.two_hosts import KEYS, PERIOD, STEPS, TwoHosts


def in_one_process(folder, keys: list[str], server) -> OneWorker:
  """A complete run of two slices."""
  run = OneWorker(folder, keys, slices=2, server=server)
  with run.launched() as worker:
    assert run.wait(worker) == 0, run.tail()
  return run


@pytest.mark.soak  # the others have all copies on one host
def test_the_slice_whose_copy_is_whole_restores_for_all(compiled, server, tmp_path):
  """The host of slice 0 lacks the copies of one of its two processes. The host of slice 1 has a whole copy.

  Oracle: one process with two devices, which computes all and has no local copies.
  """
  run = TwoHosts(tmp_path / "run", [compiled], server=server)
  reached = run.kill_after(4 * PERIOD)
  gone = [path for home in run.homes for path in home.rglob("*.s0.p1.*")]
  assert gone
  for path in gone:
    path.unlink()
  assert run.finish() == 0, run.tail()
  (step,) = {event["step"] for event in run.events("restore") if event["tier"] == "emergency"}
  assert reached - 2 * PERIOD <= step <= reached
  assert sorted(run.losses()) == list(range(1, STEPS + 1))
  undisturbed = in_one_process(tmp_path / "undisturbed", [*KEYS, compiled], server)
  assert differences(run, undisturbed, STEPS) == []
