"""Runs a tiny model through random fault histories and compares each run with an undisturbed run.

  JAX_PLATFORMS=cpu python -m end_to_end.elastic_histories [--count 1000] [--first 0] [key=value ...]

Seed i determines history i: slices lost during a step, a snapshot, a save, an evaluation, a restore or a recovery,
double faults, returns, and flapping slices. Every third run has a fixed mesh and waits for replacements. The other runs
continue with the remaining slices. Each run must complete, and every step must use the same examples as in the
undisturbed run. On a fixed mesh, losses and final state must be bit-identical; otherwise losses must agree within 1e-5.
A fault may cost at most one completed step. After the first history that breaks a rule, prints the command that repeats
it and exits with 1.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
from tests.support.elastic_harness import NUM_SLICES, Harness, History

from trainer.config.faults import RandomFaults
from trainer.elastic.elastic_run import Outcome
from trainer.elastic.faults import draw

STEPS = 12
KEYS = (f"steps={STEPS}", "checkpoint_period=4", "snapshot_period=1", "eval_interval=3", "eval_steps=1")
TOLERANCE = 1e-5  # relative difference of float32 losses whose sums are computed in another order


def histories(first: int, count: int) -> Iterator[tuple[str, bool]]:
  """Yields (fault_injection, fixed mesh) of the histories first .. first + count - 1."""
  for seed in range(first, first + count):
    rate = (0.1, 0.25, 0.5)[seed // 3 % 3]
    yield ", ".join(map(str, draw(RandomFaults(seed, rate), NUM_SLICES, STEPS))), seed % 3 == 0


def run(harness: Harness, name: str, faults: str, fixed_mesh: bool, keys: Sequence[str] = ()) -> History:
  """Runs with these faults and more `keys`, and returns the history."""
  least = -1 if fixed_mesh else 1
  return harness.run(name, [*KEYS, *keys, f"fault_injection={faults}", f"elastic_min_slice_count={least}"])


def check(history: History, undisturbed: History, fixed_mesh: bool) -> list[str]:
  """Returns the rules that the history breaks; [] if it breaks none."""
  broken = []
  if history.outcome != Outcome("complete", STEPS):
    broken.append(f"ended with {history.outcome}")
  for step in range(1, STEPS + 1):
    if history.used.get(step) != undisturbed.used[step]:
      broken.append(f"step {step} used other examples")
    ours, theirs = history.losses.get(step, float("nan")), undisturbed.losses[step]
    if not abs(ours - theirs) <= (0 if fixed_mesh else TOLERANCE * abs(theirs)):
      broken.append(f"step {step} has loss {ours!r}, undisturbed {theirs!r}")
  if fixed_mesh and history.state != undisturbed.state:
    broken.append("the final state differs on a fixed mesh")
  for record in history.of_kind("recovery"):
    if record["steps_lost"] > 1:
      broken.append(f"{record['steps_lost']} completed steps lost by {record['event']} of slices {record['slice']}")
  return broken


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--count", type=int, default=1000, help="number of histories")
  parser.add_argument("--first", type=int, default=0, help="seed of the first history")
  parser.add_argument("keys", nargs="*", metavar="key=value", help="for all runs, such as num_experts=4")
  options = parser.parse_args()
  jax.config.update("jax_num_cpu_devices", NUM_SLICES)
  with tempfile.TemporaryDirectory(prefix="elastic-histories-") as directory:
    return run_all(Harness(Path(directory)), options.first, options.count, options.keys)


def run_all(harness: Harness, first: int, count: int, keys: Sequence[str]) -> int:
  """Runs and checks the histories; returns the exit code."""
  undisturbed = run(harness, "undisturbed", "", fixed_mesh=True, keys=keys)
  totals = {"faults": 0, "recoveries": 0, "completed steps lost": 0, "runs without a fault": 0}
  kinds: Counter[str] = Counter()  # faults that happened, by kind and moment
  worst, start = 0.0, time.monotonic()
  for done, (faults, fixed_mesh) in enumerate(histories(first, count), 1):
    seed = first + done - 1
    history = run(harness, f"history-{seed}", faults, fixed_mesh, keys)
    broken = check(history, undisturbed, fixed_mesh)
    if broken:
      print(f"history {seed} (fault_injection='{faults}', fixed mesh: {fixed_mesh}):", *broken, sep="\n  ")
      print(f"repeat with: python -m end_to_end.elastic_histories --first {seed} --count 1 {' '.join(keys)}")
      return 1
    totals["faults"] += len(history.of_kind("fault_injected"))
    kinds.update(kind(record["fault"]) for record in history.of_kind("fault_injected"))
    totals["recoveries"] += len(history.of_kind("recovery"))
    totals["completed steps lost"] += sum(record["steps_lost"] for record in history.of_kind("recovery"))
    totals["runs without a fault"] += not faults
    worst = max(worst, *(abs(history.losses[step] / undisturbed.losses[step] - 1) for step in history.losses))
    if done % 50 == 0 or done == count:
      numbers = ", ".join(f"{value} {name}" for name, value in totals.items())
      seconds = time.monotonic() - start
      print(
        f"{done} histories in {seconds:.0f} s, all correct: {numbers}; largest relative loss difference {worst:.1e}",
        flush=True,
      )
  print("Faults that happened:", ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()))
  return 0


def kind(fault: str) -> str:
  """Returns "slice_down in a save" for slice_down@3:1:save."""
  name, _, rest = fault.partition("@")
  moment = rest.split("/")[0].split(":")[2:] or ["step"]
  return f"{name} in a {moment[0]}"


if __name__ == "__main__":
  sys.exit(main())
