"""Counts what the processes keep that survive many losses of other slices: memory, threads, file descriptors.

  python -m end_to_end.process_leaks [--losses 50]

Slices 1 and 2 of three are killed by turns and come back. Slice 0 and the supervisor live through all losses. After
each return, once three slices have trained for some steps, /proc is read for both. The first losses are a warm-up.
Prints a table, and exits with 1 if a survivor then has more threads or file descriptors than in the warm-up, or if its
memory has grown by more than GROWTH.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from end_to_end.benchmarks.common import positive
from tests.support.process_runs import ProcessRun

WARM_UP = 10  # losses
CALM_STEPS = 20  # between a return and the reading
GROWTH = 8 << 20  # bytes, from the end of the warm-up to the end: allocators keep some pages that they may use again
# No saves: TensorStore keeps 20 to 200 KB of Python objects of each (docs/benchmarks/processes.md).
KEYS = (f"steps={10**6}", f"checkpoint_period={10**6}", "eval_interval=50", "eval_steps=2")


@dataclass(frozen=True)
class Held:
  """What a process holds at one time."""

  memory: int  # resident bytes, without pages of files
  threads: int
  descriptors: int


def held(pid: int) -> Held:
  """Reads /proc of a living process."""
  folder = Path("/proc") / str(pid)
  lines = (line.split() for line in (folder / "status").read_text().splitlines())
  status = {words[0].rstrip(":"): words[1] for words in lines if len(words) > 1}
  return Held(int(status["RssAnon"]) << 10, int(status["Threads"]), len(list((folder / "fd").iterdir())))


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--losses", type=positive, default=50, help=f"losses of one slice; more than {2 * WARM_UP}")
  losses = parser.parse_args().losses
  if losses <= 2 * WARM_UP:
    parser.error(f"--losses {losses}: it must be more than {2 * WARM_UP}, of which {WARM_UP} are a warm-up")
  with tempfile.TemporaryDirectory(prefix="process-leaks-") as directory:
    run = ProcessRun(Path(directory), [*KEYS, f"jax_cache_dir={Path(directory) / 'compiled'}"])
    readings = lose_slices(run, losses)
  broken = 0
  print("| process | of losses | memory (median) | threads (most) | file descriptors (most) |\n|---|---|---|---|---|")
  for name, found in readings.items():
    early, late = found[WARM_UP : 2 * WARM_UP], found[-WARM_UP:]
    for label, part in ((f"{WARM_UP + 1} to {2 * WARM_UP}", early), (f"{losses - WARM_UP + 1} to {losses}", late)):
      memory, threads, descriptors = summary(part)
      print(f"| {name} | {label} | {memory / (1 << 20):.1f} MB | {threads} | {descriptors} |")
    before, after = summary(found[: 2 * WARM_UP]), summary(late)
    broken += after[1] > before[1] or after[2] > before[2] or after[0] - summary(early)[0] > GROWTH
  return 1 if broken else 0


def summary(readings: list[Held]) -> tuple[float, int, int]:
  """The median of the memory in bytes, and the largest numbers of threads and descriptors."""
  return (
    statistics.median(one.memory for one in readings),
    max(one.threads for one in readings),
    max(one.descriptors for one in readings),
  )


def lose_slices(run: ProcessRun, losses: int) -> dict[str, list[Held]]:
  """Makes the losses. Returns the readings of each survivor, one per loss."""
  found: dict[str, list[Held]] = {"slice 0": [], "supervisor": []}
  with run.launched() as supervisor:
    run.wait_for(lambda: len(run.active()) == 3, supervisor, 300)
    survivor = run.workers()[0]
    for loss in range(losses):
      assert run.kill(1 + loss % 2)
      run.wait_for(lambda loss=loss: run.count("slice_up") > loss, supervisor, 300)
      calm = run.last_step + CALM_STEPS
      run.wait_for(lambda calm=calm: len(run.active()) == 3 and run.last_step >= calm, supervisor, 300)
      assert run.workers()[0] == survivor, "slice 0 was started again"
      found["slice 0"].append(held(survivor))
      found["supervisor"].append(held(supervisor.pid))
  return found


if __name__ == "__main__":
  sys.exit(main())
