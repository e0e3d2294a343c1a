"""Goodput under a seeded trace of faults: slices that go on beside a run that is restarted from its checkpoints.

    python -m end_to_end.benchmarks.process_goodput [--steps 2000] [--seed 0] [--slices 2]
    python -m end_to_end.benchmarks.process_goodput --slices 8 --simulate 2

One run has no faults. Two others have the same trace: a fault every 15 to 60 s, one of five hits all slices. In the
first, only the processes of the slices that are hit are killed. In the second, everything is killed and the same
command is started again, as a launcher does that restarts all processes.

Each slice has one core for itself, as on a node of its own: a slice that starts again takes nothing from the others. So
this machine needs a core for each slice, and nothing else should run.

Goodput = slice-seconds that the steps take without faults / live slice-seconds. A slice that was hit is not live until
it takes part in a step again. A slice that was not hit is live all the time, also while a launcher restarts it. What a
step takes without faults is measured in the same run, because a machine's speed differs from run to run: from some
seconds after all slices are back, to the next fault. All three runs must end with the same losses and the same state,
bit by bit.

--simulate computes a day of the same trace with the measured costs of docs/benchmarks/processes.md, steps of so many
seconds and a local copy every 2 s, for more slices than this machine has cores. `end_to_end.benchmarks.fleet --trace`
measures it with sleeps.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import random
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from end_to_end.benchmarks.common import positive
from end_to_end.benchmarks.process_recovery import MODEL, steps
from tests.support.command import differences
from tests.support.process_runs import ProcessRun

LEAST, MOST = 15.0, 60.0  # seconds between two faults
ALL = 0.2  # share of the faults that hit all slices
SETTLED = 3.0  # seconds after all slices are back; then the run is as without faults
LOCAL_PERIOD, STORAGE_PERIOD = 20, 200  # steps between local copies, and between checkpoints

# For `simulate`, as docs/benchmarks/processes.md has measured it.
DAY = 24 * 3600.0
LOSS_SECONDS, RETURN_SECONDS = 0.109, 0.136  # that a step takes longer, besides the shares of the lost slice
START_SECONDS = 3.6  # from a kill until the slice can compute again
COPY_SECONDS = 2.0  # from one local copy to the next; at least a step


@dataclass(frozen=True)
class Fault:
  """`slices` are hit, `at` seconds after the first step of the run."""

  at: float
  slices: tuple[int, ...]


def trace(seed: int, slices: int) -> Iterator[Fault]:
  """Yields faults without end."""
  chance, at = random.Random(seed), 0.0
  while True:
    at += chance.uniform(LEAST, MOST)
    yield Fault(at, tuple(range(slices)) if chance.random() < ALL else (chance.randrange(slices),))


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--steps", type=positive, default=2000)
  parser.add_argument("--seed", type=int, default=0, help="of the trace")
  parser.add_argument("--slices", type=positive, default=2)
  parser.add_argument("--simulate", type=float, help="seconds of a step without faults")
  options = parser.parse_args()
  if options.simulate:
    print("slices | shares of a slice | a step | goodput of a day")
    for shares in (1, 2, 4, 8):
      goodput = simulate(options.simulate, options.slices, shares, trace(options.seed, options.slices))
      print(f"{options.slices} | {shares} | {options.simulate:g} s | {goodput:.1%}")
    return
  cores = sorted(os.sched_getaffinity(0))
  if len(cores) < options.slices:
    parser.error(f"--slices {options.slices}: each slice needs a core of its own, and this machine has {len(cores)}")
  with tempfile.TemporaryDirectory(prefix="process-goodput-") as directory:
    compare(Path(directory), options.steps, options.seed, cores[: options.slices])


def simulate(step: float, slices: int, shares: int, faults: Iterator[Fault]) -> float:
  """The goodput of a day. A step takes as long as the member with the most shares, and the shares of a slice that is
  lost in it are computed after the others."""
  now, done, live = 0.0, 0, 0.0
  period = max(1, round(COPY_SECONDS / step))
  ready: dict[int, float] = {}  # when each lost slice can join
  fault = next(faults)
  seconds = lambda count, alive: math.ceil(count / alive) * step / shares
  while now < DAY:
    joining = {member for member, at in ready.items() if at <= now}
    ready = {member: at for member, at in ready.items() if member not in joining}
    alive = set(range(slices)) - ready.keys()
    end = now + seconds(slices * shares, len(alive)) + RETURN_SECONDS * bool(joining)
    while fault.at < end and (hit := alive & set(fault.slices)) != alive:
      alive -= hit
      live += len(hit) * max(0.0, fault.at - now)
      ready |= dict.fromkeys(hit, fault.at + START_SECONDS)
      if hit:
        end += LOSS_SECONDS + seconds(shares * len(hit), len(alive))
      fault = next(faults)
    if fault.at < end:  # all are lost
      live += len(alive) * max(0.0, fault.at - now)
      now, done, ready, fault = fault.at + START_SECONDS, done - done % period, {}, next(faults)
    else:
      live += len(alive) * (end - now)
      now, done = end, done + 1
  return done * step * slices / live


def compare(folder: Path, count: int, seed: int, cores: list[int]) -> None:
  """Makes the three runs and prints a row for each."""

  def make(name: str) -> ProcessRun:
    ram = folder / name / "ram"
    ram.mkdir(parents=True)
    keys = [*MODEL, f"steps={count}", f"checkpoint_period={STORAGE_PERIOD}", f"jax_cache_dir={folder / 'compiled'}"]
    local = f"enable_emergency_checkpoint=true local_checkpoint_directory={ram} local_checkpoint_period={LOCAL_PERIOD}"
    return ProcessRun(folder / name, [*keys, *local.split()], slices=len(cores))

  undisturbed = make("undisturbed")
  print("The trace (seconds: slices):")
  print(", ".join(f"{fault.at:.0f}: {fault.slices}" for fault in itertools.islice(trace(seed, len(cores)), 20)))
  print("\n| run | faults | of all slices | wall time | live slice-seconds | steps repeated | usual step | goodput |")
  print("|---|---|---|---|---|---|---|---|")
  for name, restart in (("no faults", None), ("the other slices go on", False), ("everything restarts", True)):
    run = undisturbed if restart is None else make(name.replace(" ", "-"))
    happened = play(run, cores, None if restart is None else trace(seed, len(cores)), restart=bool(restart))
    assert run.losses() == undisturbed.losses(), name
    assert differences(run, undisturbed, count) == [], name
    seconds = times(run)[-1] - times(run)[0]
    away = [(when, returned(run, fault, when)) for fault, when in happened]
    live = len(cores) * seconds - sum(back - when for when, backs in away for back in backs)
    usual = between(times(run), [(when, max(backs) + SETTLED) for when, backs in away])
    of_all = sum(len(fault.slices) == len(cores) for fault, _ in happened)
    columns = [name, len(happened), of_all, f"{seconds:.0f} s", f"{live:.0f} s", len(times(run)) - count]
    columns += [f"{1000 * usual:.1f} ms", f"{(count - 1) * usual * len(cores) / live:.1%}"]
    print(f"| {' | '.join(map(str, columns))} |", flush=True)


def play(
  run: ProcessRun, cores: list[int], faults: Iterator[Fault] | None, *, restart: bool
) -> list[tuple[Fault, float]]:
  """Runs to the end. Returns the faults that happened, each with the time of the kill, in seconds since the epoch."""
  happened: list[tuple[Fault, float]] = []
  began: float | None = None  # when the first step was completed
  endless = faults or itertools.repeat(Fault(math.inf, ()))
  fault = next(endless)
  with pinned(run, cores):
    while True:
      with run.launched() as supervisor:  # the end of the block kills what runs
        while supervisor.poll() is None:
          time.sleep(0.05)
          if began is None and run.last_step:
            began = times(run)[0]
          # To read all records takes time of the slices' cores, so only once the time has come.
          if began is None or time.time() < began + fault.at or len(run.active()) < len(cores):
            continue
          happened.append((fault, time.time()))
          hit, fault = fault.slices, next(endless)
          if restart:
            break
          for member in hit:
            run.kill(member)
        else:
          assert supervisor.poll() == 0, run.tail()
          return happened


def times(run: ProcessRun) -> list[float]:
  """The times of all recorded steps, repeated ones too, in seconds since the epoch."""
  return [record["wall"] for record in steps(run)]


def returned(run: ProcessRun, fault: Fault, when: float) -> list[float]:
  """When each of the slices that were hit has taken part in a step again; the end of the run if it has not."""
  after = [record for record in steps(run) if record["wall"] > when]
  ends = times(run)[-1]
  return [next((r["wall"] for r in after if str(member) in r["slice_seconds"]), ends) for member in fault.slices]


def between(steps_at: Sequence[float], excluded: Sequence[tuple[float, float]]) -> float:
  """The mean seconds from one step to the next, over all steps of which no part is in an excluded time."""
  taken = [
    end - start
    for start, end in itertools.pairwise(steps_at)
    if all(end <= first or start >= last for first, last in excluded)
  ]
  return sum(taken) / len(taken)


@contextlib.contextmanager
def pinned(run: ProcessRun, cores: list[int]) -> Iterator[None]:
  """While the block runs, each slice's process has a core for itself from its start on."""
  ended = threading.Event()

  def pin() -> None:
    done = set[int]()
    while not ended.wait(0.1):
      for member, pid in run.workers().items():
        if pid not in done:
          done.add(pid)
          with contextlib.suppress(OSError):  # the process or a thread has ended
            for thread in (Path("/proc") / str(pid) / "task").iterdir():
              os.sched_setaffinity(int(thread.name), {cores[member]})

  thread = threading.Thread(target=pin, daemon=True)
  thread.start()
  try:
    yield
  finally:
    ended.set()
    thread.join()


if __name__ == "__main__":
  main()
