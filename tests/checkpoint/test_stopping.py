"""How the command ends on Ctrl-C (130) and on SIGTERM (42): what it prints and leaves, and that it resumes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from tests.support import command
from tests.support.command import ROOT, Run
from tests.support.command_runs import ENDLESS, KEYS, assert_stopped, start_and_train, write_text
from tests.support.seeds import few

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore:Sharding info not provided")]


# ---- 130


@pytest.mark.parametrize(
  "keys",
  [
    pytest.param(["checkpoint_period=2"], id="saving"),
    pytest.param(["enable_checkpointing=false"], id="not saving", marks=pytest.mark.soak),
  ],
)
def test_ctrl_c_between_steps_is_130_with_one_line(make, keys):
  run = make(f"steps={ENDLESS}", *keys)
  process = start_and_train(run, 5)
  process.send_signal(signal.SIGINT)
  assert process.wait(60) == 130, run.printed[-4000:]
  assert "Traceback" not in run.printed
  again = "goes on from the last checkpoint" if keys == ["checkpoint_period=2"] else "starts from step 0"
  assert run.printed.splitlines()[-1] == f"Interrupted: the same command {again}."
  assert run.events("run_end")[-1]["exit"] == 130
  last = run.last_step
  process = start_and_train(run, last + 2) if keys == ["checkpoint_period=2"] else run.start()
  assert command.wait_until(process, lambda: len(run.events("init_done")) == 2)
  process.send_signal(signal.SIGINT)
  assert process.wait(60) == 130
  assert run.losses()  # raises if a repeated step has another loss


@pytest.mark.parametrize(("number", "code"), few([(signal.SIGTERM, 42)], [(signal.SIGINT, 130), (signal.SIGTERM, 42)]))
def test_a_signal_in_the_first_compilation_ends_the_process_at_once(make, number, code):
  """The compilation would take longer than a scheduler waits, and there is nothing to save."""
  run = make("steps=9", "base_num_decoder_layers=60", "scan_layers=false", "jax_cache_dir=")
  process = run.start()
  assert command.wait_until(process, lambda: bool(run.events("attempt_start")))
  time.sleep(1)  # the process is in the compiler now
  begin = time.monotonic()
  process.send_signal(number)
  assert process.wait(60) == code, run.printed[-4000:]
  assert time.monotonic() - begin < 10
  assert "Traceback" not in run.printed and [event["exit"] for event in run.events("run_end")] == [code]
  assert run.last_step == 0 and not run.committed_steps()


# ---- 42


@pytest.mark.soak
def test_an_evaluation_due_at_the_step_of_a_sigterm_is_done_once_after_the_resume(make, tmp_path):
  """Also if the next processes are killed before that evaluation, and between it and the next checkpoint."""
  run = make(*write_text(tmp_path), f"steps={ENDLESS}", "eval_interval=1", "eval_steps=1", "checkpoint_period=1000000")

  def evaluated() -> list[int]:
    return [record["step"] for record in run.records("metrics") if "eval_loss" in record]

  process = start_and_train(run, 3)
  process.send_signal(signal.SIGTERM)
  stopped = assert_stopped(run, process)
  assert evaluated() == list(range(1, stopped))
  process = run.start()
  assert command.wait_until(process, lambda: bool(run.events("checkpoint_restored")), pause=0.001), run.printed[-4000:]
  process.send_signal(signal.SIGKILL)
  process.wait(60)
  process = run.start()
  assert command.wait_until(process, lambda: stopped in evaluated(), pause=0.001), run.printed[-4000:]
  process.send_signal(signal.SIGKILL)
  process.wait(60)
  for _ in range(2):
    assert run.finish(f"steps={stopped + 2}") == 0, run.printed[-4000:]
    assert evaluated().count(stopped) == 1
  assert set(evaluated()) == set(range(1, max(evaluated()) + 1))
  assert run.losses()


def test_sigterm_in_an_evaluation_saves_at_once_and_the_next_process_evaluates(make):
  """The evaluation of the last step would take hours. Then SIGTERM comes while the next process makes up for it."""
  run = make("steps=2", "checkpoint_period=1000000", "eval_interval=1000")
  for begun in (lambda: run.last_step == 2, lambda: "evaluating now" in run.printed):
    process = run.start("eval_steps=100000000")
    assert command.wait_until(process, begun), run.printed[-4000:]
    time.sleep(0.5)
    begin = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert assert_stopped(run, process) == 2
    assert time.monotonic() - begin < 20
  assert run.printed.count("The evaluation at step 2 stops here: another process does it.") == 2
  assert len(run.events("checkpoint_saved")) == 1  # the second process has nothing new to save
  assert run.finish("eval_steps=1") == 0, run.printed[-4000:]
  assert [record["step"] for record in run.records("metrics") if "eval_loss" in record] == [2]


WRAPPED = {
  "exec": "{command}",
  "after another": "true && {command}",
  "trap": "trap 'kill -TERM $child' TERM; {command} & child=$!; wait $child; code=$?; "
  "while kill -0 $child 2>/dev/null; do wait $child; code=$?; done; exit $code",
}


@pytest.mark.parametrize("how", few(["trap"], WRAPPED))
def test_sigterm_to_a_bash_wrapper_is_42(tmp_path, compiled, how):
  run = Run(tmp_path / "a", [*KEYS, compiled, f"steps={ENDLESS}"])
  line = WRAPPED[how].format(command=" ".join([sys.executable, "-m trainer", *run.argv()]))
  with run.log.open("wb") as log:
    wrapper = subprocess.Popen(
      ["bash", "-c", line], env=command.cpu_environment({}), cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
    )
  assert command.wait_until(wrapper, lambda: run.last_step >= 3), run.printed
  wrapper.send_signal(signal.SIGTERM)
  assert_stopped(run, wrapper)


def test_sigterm_to_the_group_of_a_bash_wrapper_is_one_notice(tmp_path, compiled):
  """`timeout` and tini -g signal the whole group. bash ends at once; the command must still save and commit."""
  run = Run(tmp_path / "a", [*KEYS, compiled, f"steps={ENDLESS}"])
  line = " ".join([sys.executable, "-m trainer", *run.argv()]) + "; echo ended with $?"
  with run.log.open("wb") as log:
    wrapper = subprocess.Popen(
      ["bash", "-c", line],
      env=command.cpu_environment({}),
      cwd=ROOT,
      stdout=log,
      stderr=subprocess.STDOUT,
      start_new_session=True,
    )
  assert command.wait_until(wrapper, lambda: run.last_step >= 3), run.printed
  os.killpg(wrapper.pid, signal.SIGTERM)
  wrapper.wait(60)
  deadline = time.monotonic() + 120
  while not run.events("run_end") and time.monotonic() < deadline:
    time.sleep(0.05)
  assert run.events("run_end")[-1]["exit"] == 42, run.printed
  assert run.committed_steps()[-1] == run.last_step
