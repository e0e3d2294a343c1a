"""Slices as real processes: killed, stopped and asked to leave. Every run is compared with an undisturbed one.

The undisturbed run is one process that computes the shares of all slices.
"""

from __future__ import annotations

import signal

import numpy as np
import pytest
from tests.launch.conftest import KEYS, ONE_WORLD, STEPS
from tests.support import process_runs
from tests.support.command import Run, differences
from tests.support.forked_runs import SLOW
from tests.support.process_runs import ProcessRun
from tests.support.torchrun_runs import OneWorker

WAITS = "elastic_min_slice_count=-1"  # for a lost slice: a run of few steps lives through many losses


def check(run: ProcessRun, undisturbed: OneWorker) -> None:
  """The run has the same steps, evaluations, losses and final state as the undisturbed one, each recorded once."""
  check_steps(run, STEPS)
  assert run.evaluations() == undisturbed.evaluations(), run.tail()
  assert all(len(losses) == 1 for losses in run.evaluations().values())
  assert differences(run, undisturbed, STEPS) == []


def check_steps(run: ProcessRun, last: int) -> None:
  """The run has recorded the steps up to `last`, in order, each once."""
  assert run.steps() == list(range(1, last + 1)), run.tail()


def test_shares_of_three_worlds_train_as_three_slices_of_one_process(undisturbed, compiled, server, tmp_path):
  """The sums of gradients are in another order there, so the losses may differ in the last digits. Other tests show
  that three worlds have the losses of `undisturbed`."""
  keys = [*process_runs.KEYS, compiled, "elastic_enabled=false", "num_slices=3", "steps=50", "eval_interval=-1"]
  single = Run(tmp_path, [*ONE_WORLD, *keys], server.start)
  assert single.finish(timeout=120) == 0, single.printed
  ours, theirs = undisturbed.losses(), single.losses()
  assert list(theirs) == list(range(1, 51))
  for step in theirs:
    np.testing.assert_allclose(ours[step], theirs[step], rtol=1e-5)
  assert undisturbed.committed_steps() == [STEPS // 2, STEPS]


@pytest.mark.slow
def test_no_fault_of_a_slice_costs_a_step(undisturbed, compiled, server, tmp_path):
  """One run. A slice gets SIGTERM. Two slices, one of them the primary, are killed at once, and one of the two fails
  twice while it starts, as a bad host does. Then three faults that are rehearsed: a kill, a hang, and a kill in an
  evaluation."""
  faults = "slice_down@60:0, hang@65:2, slice_down@75:1:eval/1"
  keys = [*KEYS, compiled, WAITS, f"fault_injection={faults}", "exchange_network=lo"]
  run = ProcessRun(tmp_path, keys, environment=SLOW, server=server)

  def members(kind: str) -> list[int]:
    return sorted(member for event in run.events(kind) for member in event["slice"])

  with run.launched() as supervisor:
    run.wait_for(lambda: run.last_step >= 5, supervisor)
    first = run.first_primary
    leaves, second = (first + 1) % 3, (first + 2) % 3
    assert run.kill(leaves, signal.SIGTERM)
    run.wait_for(lambda: members("slice_up") == [leaves], supervisor)
    assert run.count("primary") == 0
    joined_after = run.last_step
    run.wait_for(lambda: run.last_step > joined_after, supervisor)  # `leaves` has the state; the other two may die
    assert run.kill(first) and run.kill(second)
    for starts in (1, 2):
      run.wait_for(lambda n=starts: run.printed.count(f"Starting member {second} again") == n, supervisor)
      run.wait_for(lambda: run.kill(second, signal.SIGABRT), supervisor)  # it has not completed a step
    run.wait_for(lambda: members("slice_up") == [0, 1, 2], supervisor)
    assert run.last_step < 60  # the rehearsed faults come later
    assert run.wait(supervisor) == 0, run.tail()
  check(run, undisturbed)
  assert f"Member {leaves} ended with exit code 42" in run.printed and "waiting for the others" in run.printed
  assert run.printed.count(f"Starting member {second} again") >= 3
  assert members("slice_down") == sorted([first, second, 0, 1, 2])  # a slice that leaves in good order is not lost
  assert run.count("primary") >= 1
  assert run.count("wait_slices") >= 1
  assert [event["times"] for event in run.events("member_failing") if event["member"] == second] == [2, 3]
  assert [event["fault"] for event in run.events("fault_injected")] == faults.split(", ")
  assert "Member 0 killed by SIGKILL" in run.printed and "Member 2 is ended: " in run.printed
  (hang,) = [event for event in run.events("slice_down") if event["slice"] == [2] and event["step"] >= 60]
  assert hang["detect_seconds"] >= 5


@pytest.mark.soak
def test_a_slice_with_wrong_sums_is_taken_out_before_they_count_and_stays_away(undisturbed, compiled, server, tmp_path):
  """Of the gradients of slice 0, one bit is wrong in step 16, in which a witness compares one of its shares."""
  keys = [*KEYS, compiled, "witness_period=16", "fault_injection=flip_gradient@16:0"]
  run = ProcessRun(tmp_path, keys, server=server)
  with run.launched() as supervisor:
    assert run.wait(supervisor) == 0, run.tail()
  check(run, undisturbed)
  (alarm,) = run.events("witness")
  assert (alarm["outcome"], alarm["round"], alarm["members"]) == ("removed", "step 16", [0])
  assert list(alarm["arrays"].values()) == [1] and alarm["where"]["0"].startswith("host ")
  assert (run.directory / "log.txt").read_text().count("Wrong sums from slice 0") == 1, "also if 0 was the primary"
  assert [(event["slice"], event["step"]) for event in run.events("slice_down")] == [([0], 15)], run.tail()
  assert run.count("slice_up") == 0 and "Starting member 0 again" not in run.printed
