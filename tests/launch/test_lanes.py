"""Slices of two processes each: the death of one process takes its slice out, and nothing else."""

from __future__ import annotations

import os
import signal

import pytest
from tests.launch.conftest import LANES, LANES_STEPS
from tests.support.command import differences
from tests.support.forked_runs import LATE_LANES, SLOW
from tests.support.process_runs import ProcessRun
from tests.support.torchrun_runs import OneWorker

from worlds.place import LANE, MEMBER


def process_of(run: ProcessRun, member: int, lane: int) -> int:
  """The process id of one lane."""
  name = (str(member), str(lane))
  (pid,) = [pid for pid, env in run.processes().items() if (env.get(MEMBER), env.get(LANE)) == name]
  return pid


@pytest.mark.soak  # tests/drivers/test_rounds.py has the agreement
@pytest.mark.parametrize("member", [0, 1])
def test_processes_of_a_slice_compute_the_same_shares_though_one_hears_of_a_loss_late(
  compiled, server, tmp_path, member
):
  """The shares of slice 0 come before those of the others, and those of slice 1 between them."""
  run = ProcessRun(
    tmp_path / "lanes",
    [*LANES, compiled, "elastic_min_slice_count=1"],
    slices=3,
    options=["--processes-per-slice", "2"],
    environment={LATE_LANES: "0.5"},
    server=server,
  )
  with run.launched() as supervisor:
    run.wait_for(lambda: run.last_step >= 3, supervisor)
    os.kill(process_of(run, member=member, lane=0), signal.SIGKILL)
    assert run.wait(supervisor) == 0, run.tail()
  assert run.count("slice_down") == 1, run.tail()
  one_worker = OneWorker(tmp_path / "one-worker", [*LANES, compiled], slices=3, server=server)
  with one_worker.launched() as worker:
    assert one_worker.wait(worker) == 0, one_worker.tail()
  assert differences(run, one_worker, LANES_STEPS) == []


@pytest.mark.slow
def test_a_killed_process_of_a_slice_costs_no_step(compiled, server, tmp_path):
  """Oracle: one process with two devices, which computes all. Losses and the last checkpoint are bit-identical."""
  run = ProcessRun(
    tmp_path / "lanes",
    [*LANES, compiled, "elastic_min_slice_count=-1", "witness_period=4"],
    slices=2,
    options=["--processes-per-slice", "2"],
    environment=SLOW,
    server=server,
  )
  with run.launched() as supervisor:
    run.wait_for(lambda: run.last_step >= 3, supervisor)
    os.kill(process_of(run, member=1, lane=1), signal.SIGKILL)
    assert run.wait(supervisor) == 0, run.tail()
  assert [event["slice"] for event in run.events("slice_down")] == [[1]], run.tail()
  assert run.count("witness") == 0, "no lane computes other bits"
  assert run.count("slice_up") == 1 and run.steps() == list(range(1, LANES_STEPS + 1))
  one_worker = OneWorker(tmp_path / "one-worker", [*LANES, compiled], slices=2, server=server)
  with one_worker.launched() as worker:
    assert one_worker.wait(worker) == 0, one_worker.tail()
  assert run.losses() == one_worker.losses()
  assert differences(run, one_worker, LANES_STEPS) == []
