"""SIGTERM at random moments of the real command, which is started again until the run is complete.

A tiny model trains on text with a checkpoint after every fifth step and an evaluation after every third. A third of the
signals come between 0.3 s after the start of a process and the time that an undisturbed run takes, a third after a
random step, and a third around the last step. A process ends with 42 and everything committed, or with 0 and the run
complete."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from end_to_end.histories import oracle
from end_to_end.histories.__main__ import Play, Played
from tests.support import command
from tests.support.command import Process, Run

STEPS, SIGNALS = 60, 3  # signals: in a history, at most
EARLIEST_SECONDS = 0.3  # after the start of the process
KEYS = "checkpoint_period=5 max_num_checkpoints_to_keep=2 eval_interval=3 eval_steps=1".split()
AIMS = ("at any moment", "after a step", "around the end")


def cpu_seconds(process: Process) -> float:
  """User and system time of the process so far."""
  fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
  return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def handles_sigterm(process: Process) -> bool:
  """Whether the process has a handler for SIGTERM."""
  lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
  caught = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:"))
  return bool(caught >> (signal.SIGTERM - 1) & 1)


def wait_for_handler(process: Process) -> None:
  """Waits until the process is EARLIEST_SECONDS old and has a handler.

  Raises AssertionError if the process needs more than EARLIEST_SECONDS of CPU time. Wall time may be longer.
  """
  time.sleep(EARLIEST_SECONDS)
  while process.poll() is None and not handles_sigterm(process):
    assert cpu_seconds(process) < EARLIEST_SECONDS, f"no handler for SIGTERM after {cpu_seconds(process)} s of CPU time"
    time.sleep(0.005)


def terminate(run: Run, aim: str, chance: random.Random, duration: float, steps: int) -> int:
  """Starts the run, sends SIGTERM, and returns the exit code. Raises AssertionError if it leaves what it may not."""
  first, began = run.last_step, time.monotonic()
  process = run.start()
  wait_for_handler(process)
  until = began + chance.uniform(EARLIEST_SECONDS, duration)
  step = chance.randint(min(first + 1, steps), steps) if aim == "after a step" else steps
  moment = (lambda: time.monotonic() >= until) if aim == "at any moment" else (lambda: run.last_step >= step)
  command.wait_until(process, moment, pause=0.002)
  if aim == "around the end":
    time.sleep(chance.uniform(0, 0.8))
  process.send_signal(signal.SIGTERM)
  code = command.wait_for_exit(process)
  if wrong := mistake(code, run.last_step, max(run.committed_steps(), default=0), steps):
    raise AssertionError(f"SIGTERM {aim}, after {time.monotonic() - began:.2f} s: {wrong}\n{run.printed[-4000:]}")
  return code


def mistake(code: int, last: int, committed: int, steps: int) -> str:
  """What is wrong with a process that ended with `code` after step `last`; "" if nothing is."""
  if code not in (0, 42):
    return f"exit code {code}"
  if committed != last:
    return f"step {last} is not committed"
  return "exit code 0, but the run is not complete" if code == 0 and last != steps else ""


def check(run: Run, undisturbed: Run, steps: int) -> list[str]:
  """The rules that a complete run breaks."""
  ours, theirs = (oracle.read(each.directory, steps, printed=each.printed) for each in (run, undisturbed))
  return oracle.broken(ours, theirs, oracle.Promise(steps))


@contextlib.contextmanager
def opened(
  folder: Path, kind: str, seeds: range, keys: Sequence[str], start: command.Start = command.start, steps: int = STEPS
) -> Iterator[Play]:
  """Yields what plays a history. start: starts the command."""
  own = [*KEYS, f"steps={steps}", *keys]
  warm = command.text_run(folder, "warm", own, start)
  assert warm.finish() == 0, warm.printed[-4000:]  # makes tokens and compiled programs
  undisturbed, began = command.text_run(folder, "undisturbed", own, start), time.monotonic()
  assert undisturbed.finish() == 0, undisturbed.printed[-4000:]
  duration = time.monotonic() - began

  def play(seed: int) -> Played:
    chance, counts = random.Random(seed), Counter[str]()
    run = command.text_run(folder, f"terminated-{seed}", own, start)
    aims = [chance.choice(AIMS) for _ in range(chance.randint(1, SIGNALS))]
    try:
      for aim in aims:
        counts[f"SIGTERM {aim}"] += 1
        if terminate(run, aim, chance, duration, steps) == 0:
          break
      code = run.finish()
      broken = [f"exit code {code}"] if code else check(run, undisturbed, steps)
    except AssertionError as error:
      broken = [str(error)]
    return Played(", ".join(aims), broken, counts, run.printed[-3000:] if broken else "")

  yield play
