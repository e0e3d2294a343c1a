"""How `python -m trainer.launch.local` ends: bad input, an error of every slice, Ctrl-C, and a second launch."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
from tests.support.command import TINY
from tests.support.forked_runs import ENDLESS
from tests.support.process_runs import ProcessRun
from tests.support.seeds import few

from trainer.launch import local

CONFIG = TINY[0]


@pytest.mark.parametrize(
  "arguments, text",
  [
    (["--slices", "0", CONFIG], "--slices: 0 must be a whole number of at least 1"),
    (["--slices", "2", "--spares", "-1", CONFIG], "--spares: -1 must be a whole number of at least 0"),
    (["--slices", "2", CONFIG, "num_slices=3"], "num_slices=3: trainer.launch.local sets num_slices=2"),
    (["--slices", "2", CONFIG, "cluster=simulated"], "sets cluster=multiprocess"),
    (["--slices", "2", CONFIG, "num_slices=many"], "num_slices=many: trainer.launch.local sets num_slices=2"),
    (["--slices", "2", CONFIG, "elastic_min_slice_count=3"], "is more than --slices 2"),
    (["--slices", "2", CONFIG, "exchange_network=eth99"], "exchange_network=eth99: "),
    (["--slices", "2", CONFIG, "no_key=3"], "no_key"),
    (["--slices", "2", CONFIG, "dataset_type=text", "dataset_path=/nonexistent"], "dataset_path=/nonexistent"),
  ],
)
def test_bad_arguments_start_nothing(arguments, text, capsys):
  assert local.main(arguments) == 2
  printed = capsys.readouterr().err
  assert text in printed and printed.count("error: ") == 1


def test_an_error_of_every_slice_ends_the_run_with_one_traceback(compiled, server, tmp_path):
  keys = [compiled, ENDLESS, "learning_rate=1e9", "warmup_steps_fraction=0", "max_nonfinite_steps=2"]
  run = ProcessRun(tmp_path, keys, slices=2, server=server)
  with run.launched() as supervisor:
    assert run.wait(supervisor, 60) == 1, run.tail()
  assert run.printed.count("Traceback") == 1 and "TrainingDiverged: step" in run.printed
  assert "Starting member" not in run.printed


def test_wrong_input_that_only_the_workers_notice_is_one_message(compiled, server, tmp_path):
  run = ProcessRun(tmp_path, [compiled, "steps=10"], slices=2, server=server)
  (run.directory / "run_id").mkdir(parents=True)  # no file of a run
  with run.launched() as supervisor:
    assert run.wait(supervisor, 60) == 2, run.tail()
  assert run.printed.count("error: ") == 1 and "run_id is no regular file" in run.printed, run.tail()


@pytest.mark.slow
def test_a_second_launch_is_refused_and_ctrl_c_ends_the_first(compiled, server, tmp_path):
  """The first one is no fork: Ctrl-C reaches the processes that it would reach at a user's terminal."""
  keys = [compiled, ENDLESS, "autocheckpoint_grace_seconds=1"]
  first, second = ProcessRun(tmp_path, keys, slices=2), ProcessRun(tmp_path, keys, slices=1, server=server)
  second.log = tmp_path / "second.txt"
  with first.launched() as supervisor:
    first.wait_for(lambda: first.last_step >= 5, supervisor)
    with second.launched() as other:
      assert second.wait(other, 60) == 2, second.tail()
    step = first.last_step
    first.wait_for(lambda: first.last_step >= step + 5, supervisor)
    began = time.monotonic()
    os.killpg(supervisor.pid, signal.SIGINT)
    assert first.wait(supervisor, 30) == 130, first.tail()
    # Members that have not ended 5 s after the signal are killed. On a busy machine, the processes need time to exit.
    assert time.monotonic() - began < 10.0
  assert first.steps() == list(range(1, first.last_step + 1))
  assert "Starting member" not in first.printed and "Starting member" not in second.printed
  pids = re.findall(r"^supervisor: Member \d is process (\d+)\.$", first.printed, re.MULTILINE)
  assert f"supervisor: Process {supervisor.pid} supervises the run, at 127.0.0.1:" in first.printed and len(pids) == 2
  lines = first.log.read_text().splitlines()
  assert all(
    re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", line) for line in lines if "upervisor" in line or "step" in line
  )
  assert "supervisor: Interrupted: all processes end without a save." in first.printed
  assert "the run continues from" not in first.printed


@pytest.mark.soak  # end_to_end.histories processes has SIGTERM in evaluations
def test_sigterm_in_an_evaluation_lets_one_member_leave_and_ends_the_run(compiled, server, tmp_path):
  """The evaluation would take hours. The next launch does it, once, also if a member leaves meanwhile."""
  keys = [compiled, "steps=4", "checkpoint_period=1000", "eval_interval=2"]
  run = ProcessRun(tmp_path, keys, slices=2, server=server)
  with run.launched("eval_steps=100000000") as supervisor:
    run.wait_for(lambda: run.last_step == 2, supervisor)
    time.sleep(0.5)
    leaves = run.first_primary
    assert run.kill(leaves, signal.SIGTERM)
    run.wait_for(lambda: f"Member {leaves} ended with exit code 42." in run.printed, supervisor, 30)
    assert 1 - leaves in run.workers() and run.committed_steps() == []  # the other member still evaluates
    supervisor.send_signal(signal.SIGTERM)
    assert run.wait(supervisor, 30) == 42, run.tail()
  assert run.committed_steps() == [2] and run.evaluations() == {}
  with run.launched("eval_steps=1000") as supervisor:
    run.wait_for(lambda: "evaluating now" in run.printed, supervisor)
    time.sleep(0.2)
    assert run.kill(leaves, signal.SIGTERM)
    assert run.wait(supervisor) == 0, run.tail()
  assert run.steps() == [1, 2, 3, 4] and "Traceback" not in run.printed, run.tail()
  assert {step: len(losses) for step, losses in run.evaluations().items()} == {2: 1, 4: 1}


@pytest.mark.parametrize("number", few([signal.SIGUSR1], [signal.SIGUSR1, signal.SIGHUP]))
def test_a_warning_to_every_process_saves_and_ends(compiled, server, tmp_path, number):
  """As Slurm sends SIGUSR1 before the end of the time, and a system SIGHUP when the user is logged out."""
  run = ProcessRun(tmp_path, [compiled, ENDLESS], slices=2, server=server)
  with run.launched() as supervisor:
    run.wait_for(lambda: run.last_step >= 5, supervisor)
    for process in (supervisor.pid, *run.processes()):
      os.kill(process, number)
    assert run.wait(supervisor, 30) == 42, run.tail()
  assert run.committed_steps()[-1] == run.last_step
  assert run.steps() == list(range(1, run.last_step + 1))
