"""SIGTERM at random moments of a real run that is resumed by the same command: is anything lost, repeated or changed?

  JAX_PLATFORMS=cpu python -m end_to_end.sigterm [--signals 30] [--seed 0]

A tiny model trains on text with a checkpoint after every fifth step and an evaluation after every third. Each process
gets SIGTERM at a moment drawn from the seed: a third of them between 0.3 s after its start and the time that an
undisturbed run takes, a third after a random step, and a third around the last step. A process must end with 42 and
everything committed, or with 0 and the run complete. When a run is complete, its records must be the undisturbed run's:
every step and every evaluation once, with the same numbers, and the same final state bit by bit. Exits with 1 if
anything differs.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support import command
from tests.support.command import Process, Run

STEPS = 60
EARLIEST_SECONDS = 0.3  # after the start of the process
KEYS = "checkpoint_period=5 max_num_checkpoints_to_keep=2 eval_interval=3 eval_steps=1".split()


@dataclass(frozen=True)
class Ended:
  """The end of a process that got SIGTERM."""

  aimed: str
  seconds: float  # from its start to the signal
  code: int
  first_step: int  # steps done before the process
  last_step: int  # steps done after it
  committed: int  # newest checkpoint
  wrong: str  # the broken rule; "" if the end is right

  def row(self) -> str:
    steps = f"{self.first_step} -> {self.last_step}"
    return f"| {self.aimed} | {self.seconds:.2f} | {self.code} | {steps} | {self.committed} | {self.wrong or 'ok'} |"


TABLE = "| aimed at | SIGTERM after s | exit code | steps | committed | |\n|---|---|---|---|---|---|"


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


def terminate(run: Run, steps: int, rng: random.Random, duration: float) -> Ended | None:
  """Starts the run, sends SIGTERM at a random moment and returns how it ended; None if the run was complete before."""
  first = run.last_step
  begin = time.monotonic()
  process = run.start()
  wait_for_handler(process)
  aimed = rng.choice(["any moment", "a step", "the end"])
  if aimed == "any moment":
    until = begin + rng.uniform(EARLIEST_SECONDS, duration)
    reached = command.wait_until(process, lambda: time.monotonic() >= until, pause=0.002)
  elif aimed == "a step":
    step = rng.randint(min(first + 1, steps), steps)
    reached = command.wait_until(process, lambda: run.last_step >= step, pause=0.002)
  else:
    reached = command.wait_until(process, lambda: run.last_step >= steps, pause=0.002)
    time.sleep(rng.uniform(0, 0.8))
  if not reached or process.poll() is not None:
    assert process.poll() == 0, f"the command ended with {process.poll()}:\n{run.printed[-4000:]}"
    return None
  seconds = time.monotonic() - begin
  process.send_signal(signal.SIGTERM)
  code = command.wait_for_exit(process)
  last, committed = run.last_step, max(run.committed_steps(), default=0)
  return Ended(aimed, seconds, code, first, last, committed, mistake(code, last, committed, steps))


def mistake(code: int, last: int, committed: int, steps: int) -> str:
  """What is wrong with a process that ended with `code` after step `last`; "" if nothing is."""
  if code not in (0, 42):
    return f"exit code {code}"
  if committed != last:
    return f"step {last} is not committed"
  if code == 0 and last != steps:
    return "exit code 0, but the run is not complete"
  return ""


def differences(run: Run, undisturbed: Run, steps: int) -> list[str]:
  """The differences between a complete run and the undisturbed run, including repeated steps and evaluations."""
  found = command.differences(run, undisturbed, steps)
  for what, field in (("trained", "loss"), ("evaluated", "eval_loss")):
    ours, theirs = (
      [(record["step"], record[field]) for record in each.records("metrics") if field in record]
      for each in (run, undisturbed)
    )
    if sorted(ours) != sorted(theirs):
      found.append(f"steps {sorted(set(ours) ^ set(theirs)) or [step for step, _ in ours]} were not {what} just once")
  return found


def torment(folder: Path, start: command.Start, steps: int, signals: int, seed: int) -> Iterator[Ended | str]:
  """Yields the end of each of `signals` processes, and for each complete run its differences ("" if there are none)."""
  keys = [*KEYS, f"steps={steps}"]
  assert command.text_run(folder, "warm", keys, start).finish() == 0  # makes tokens and compiled programs
  undisturbed = command.text_run(folder, "undisturbed", keys, start)
  begin = time.monotonic()
  assert undisturbed.finish() == 0, undisturbed.printed[-4000:]
  duration = time.monotonic() - begin
  rng = random.Random(seed)
  runs = (command.text_run(folder, f"terminated-{number}", keys, start) for number in itertools.count())
  yield from ends(runs, lambda run: terminate(run, steps, rng, duration), undisturbed, steps, signals)


def ends(
  runs: Iterator[Run], end: Callable[[Run], Ended | None], undisturbed: Run, steps: int, signals: int
) -> Iterator[Ended | str]:
  """Starts each run again and again until it is complete, and the next one until `signals` were sent.

  end: starts a run and ends it with a signal; None if the run was complete before. Yields the end of each process, and
  for each complete run its differences ("" if there are none).
  """
  while signals > 0:
    run, complete = next(runs), False
    while signals > 0 and not complete:
      ended = end(run)
      if ended is not None:
        signals -= 1
        yield ended
      complete = ended is None or ended.code == 0
    code = run.finish()
    assert code == 0, f"the command ended with {code}:\n{run.printed[-4000:]}"
    yield "; ".join(differences(run, undisturbed, steps))


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--signals", type=int, default=30, help="in all")
  parser.add_argument("--seed", type=int, default=0)
  arguments = parser.parse_args()
  logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax warns when a part of a checkpoint is read
  failed = runs = 0
  print(TABLE)
  with tempfile.TemporaryDirectory(prefix="sigterm-") as name:
    for found in torment(Path(name), command.start, STEPS, arguments.signals, arguments.seed):
      if isinstance(found, Ended):
        wrong = found.wrong
        print(found.row(), flush=True)
      else:
        runs, wrong = runs + 1, found
        print(f"run {runs}: {wrong or 'equal to the undisturbed run bit by bit'}", flush=True)
      failed += bool(wrong)
  result = f"{failed} FAILED" if failed else "nothing lost, repeated or changed"
  print(f"{arguments.signals} signals, {runs} runs: {result}")
  return int(failed > 0)


if __name__ == "__main__":
  sys.exit(main())
