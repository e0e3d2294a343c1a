"""Local copies of slices that are real processes: all processes are killed, and some copies are gone."""

from __future__ import annotations

import signal

import pytest
from tests.support.command import differences
from tests.support.process_runs import ProcessRun
from tests.support.torchrun_runs import OneWorker
from tests.support.two_hosts import COPIES, KEYS, PERIOD, STEPS, TwoHosts


def on_one_host(folder, compiled: str, server) -> ProcessRun:
  """Two slices of one process each."""
  keys = [f"steps={STEPS}", f"checkpoint_period={STEPS}", *COPIES, f"local_checkpoint_directory={folder / 'ram'}"]
  return ProcessRun(folder, [compiled, *keys], slices=2, server=server)


def in_one_process(folder, keys: list[str], server) -> OneWorker:
  """A complete run of two slices."""
  run = OneWorker(folder, keys, slices=2, server=server)
  with run.launched() as worker:
    assert run.wait(worker) == 0, run.tail()
  return run


@pytest.mark.soak  # test_full_storage.py restores the copies of one slice, test_agent.py compares with one process
def test_local_copies_of_one_slice_are_enough_for_all(compiled, server, tmp_path):
  """Slice 0 has lost its copies. The copies of slice 1 are the newest state that is left.

  Oracle: one process that computes all and has no local copies.
  """
  undisturbed = in_one_process(tmp_path / "undisturbed", [*KEYS, compiled, "devices_per_slice=1"], server)
  run = on_one_host(tmp_path / "run", compiled, server)
  with run.launched() as supervisor:
    run.wait_for(lambda: run.last_step >= 4 * PERIOD, supervisor)  # all processes are killed at the end of the block
  reached = run.last_step
  copies = sorted(run.ram.rglob("*.s0.*"))
  assert copies and run.committed_steps() == []
  for path in copies:
    path.unlink()
  with run.launched() as supervisor:
    assert run.wait(supervisor) == 0, run.tail()
  (step,) = [event["step"] for event in run.events("restore") if event["tier"] == "emergency"]
  assert reached - 2 * PERIOD <= step <= reached
  assert sorted(run.losses()) == list(range(1, STEPS + 1))
  assert differences(run, undisturbed, STEPS) == []


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


@pytest.mark.soak  # test_agent.py and test_local.py lose the supervisor between steps
def test_a_restored_state_is_saved_if_the_supervisor_is_lost_during_the_missing_evaluation(compiled, server, tmp_path):
  """The newest state is in local copies, and its evaluation is not recorded: it comes before the next step."""
  run = on_one_host(tmp_path, compiled, server)
  run.keys.append("eval_interval=5")
  with run.launched("eval_steps=1") as supervisor:
    run.wait_for(lambda: run.last_step >= 12, supervisor)
  metrics = run.directory / "metrics.jsonl"
  metrics.write_text("".join(line for line in metrics.read_text().splitlines(keepends=True) if "eval_loss" not in line))
  with run.launched("eval_steps=10000") as supervisor:
    run.wait_for(lambda: "is missing: evaluating" in run.printed, supervisor)
    supervisor.send_signal(signal.SIGKILL)
    run.wait_for_workers(90)
  (step,) = [event["step"] for event in run.events("restore") if event["tier"] == "emergency"]
  assert run.committed_steps() == [step], run.tail()
