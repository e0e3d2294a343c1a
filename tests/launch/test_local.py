"""Slices as real processes: killed, stopped and asked to leave. Every run is compared with an undisturbed one.

The undisturbed run is one process that computes the shares of all slices.
"""

from __future__ import annotations

import signal
import time

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


@pytest.mark.soak  # the next test kills two at once
def test_two_of_three_slices_die_and_the_last_one_goes_on(undisturbed, compiled, server, tmp_path):
  run = ProcessRun(tmp_path, [*KEYS, compiled], environment=SLOW, server=server)
  with run.launched() as supervisor:
    run.wait_for(lambda: run.last_step >= 10, supervisor)
    first = run.first_primary
    second = next(member for member in range(3) if member != first)
    assert run.kill(first)
    run.wait_for(lambda: run.count("slice_down") == 1, supervisor)
    assert run.kill(second)
    assert run.wait(supervisor) == 0, run.tail()
  check(run, undisturbed)
  assert [event["slice"] for event in run.events("slice_down")] == [[first], [second]]
  assert run.count("primary") >= 1  # the others go on with the records
  for recovery in run.events("recovery"):
    assert recovery["steps_lost"] == 0 and recovery["compilations"] == 0 and recovery["seconds"] < 10


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


@pytest.mark.slow
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


@pytest.mark.soak  # test_agent.py loses the supervisor, checkpoint/test_kill.py all processes, test_ends.py ends all
def test_every_end_of_the_whole_run_is_followed_by_the_same_run(undisturbed, compiled, server, tmp_path):
  """SIGTERM to the supervisor, its loss, and the loss of all processes: the same command continues each time."""
  run = ProcessRun(tmp_path, [*KEYS, compiled], environment=SLOW, server=server)
  with run.launched() as supervisor:
    run.wait_for(lambda: run.last_step >= 10, supervisor)
    supervisor.send_signal(signal.SIGTERM)
    assert run.wait(supervisor) == 42, run.tail()
  stopped = run.last_step
  assert run.committed_steps() == [stopped] and 10 <= stopped < STEPS
  with run.launched() as supervisor:
    run.wait_for(lambda: run.last_step >= stopped + 10, supervisor)
    assert run.kill(1, signal.SIGSTOP)  # nobody is left who would end it
    supervisor.send_signal(signal.SIGKILL)
    supervisor.wait(30)
    run.wait_for_processes(seconds=60)  # the slices save and end
  stopped = run.last_step
  assert run.committed_steps()[-1] == stopped < STEPS
  check_steps(run, stopped)
  with run.launched() as supervisor:
    run.wait_for(lambda: run.last_step >= stopped + 3, supervisor)  # all processes are killed at the end of the block
  assert not run.processes()
  with run.launched() as supervisor:
    assert run.wait(supervisor) == 0, run.tail()
  assert run.evaluations().keys() == undisturbed.evaluations().keys()
  assert differences(run, undisturbed, STEPS) == []


@pytest.mark.soak  # of two faults that have tests of their own
def test_the_restarted_slice_takes_the_place_of_a_spare_that_hangs(undisturbed, compiled, server, tmp_path):
  run = ProcessRun(tmp_path, [*KEYS, compiled, WAITS], options=["--spares", "1"], environment=SLOW, server=server)
  with run.launched() as supervisor:
    run.wait_for(lambda: len(run.active()) == 3, supervisor)
    (victim, spare) = run.active()[-1], *({0, 1, 2, 3} - set(run.active()))
    # Without these pauses the run could end before the spare has started. A slice is lost after 5 s of silence.
    while f"Member {spare} is ready and waits as a spare." not in run.printed:
      assert run.kill(victim, signal.SIGSTOP), run.tail()
      time.sleep(1)
      assert run.kill(victim, signal.SIGCONT)
    assert run.kill(spare, signal.SIGSTOP)  # nobody waits for it yet
    assert run.kill(victim)
    assert run.wait(supervisor) == 0, run.tail()
  check(run, undisturbed)
  assert {record["slices"] for record in run.records("metrics") if "loss" in record} == {3}
  downs, ups = ([event["slice"] for event in run.events(kind)] for kind in ("slice_down", "slice_up"))
  assert f"Member {spare} is ended: no sign of life for" in run.printed
  assert (downs, ups) == ([[victim], [spare]], [[spare], [victim]])


@pytest.mark.soak  # the other tests have two shares of one micro-batch
def test_four_shares_of_two_micro_batches_have_the_same_bits_on_two_slices_as_on_one(compiled, server, tmp_path):
  steps = 30
  keys = [*KEYS, compiled, f"steps={steps}", "gradient_accumulation_steps=2", "shares_per_slice=4"]
  keys += ["base_num_decoder_layers=2", "exchange_streams=2", "exchange_network=lo", "grad_reduce_dtype=bfloat16"]
  single = OneWorker(tmp_path / "one", keys, slices=2, server=server)
  with single.launched() as worker:
    assert single.wait(worker) == 0, single.tail()
  run = ProcessRun(tmp_path / "two", keys, slices=2, server=server)
  with run.launched() as supervisor:
    run.wait_for(lambda: run.last_step >= 10, supervisor)
    assert run.kill(1)
    assert run.wait(supervisor) == 0, run.tail()
  check_steps(run, steps)
  assert differences(run, single, steps) == []
