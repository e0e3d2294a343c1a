"""Measures what witness_period=64 costs a step, in pairs of 64 steps with and without a witness of the same run.

  python -m end_to_end.benchmarks.witness [--steps 2000] [--shares 16] [--seconds 0.02]

Two slices have the real supervisor, exchange, driver, programs and digests of a tiny model; they are threads of this
process. A share takes --seconds more, in which its thread sleeps, as it would wait for a device. witness_period=128: so
of two blocks of 64 steps in a row, one has a witness. Prints how much longer a step takes with witness_period=64:

  pairs    the mean step of a block with a witness, compared with the mean step of the block before it
  witness  the same from the step of each witness alone, compared with the median of the 8 steps on each side

Both are means with a 95 % interval (bootstrap over the witnesses).
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from end_to_end.benchmarks.common import positive
from end_to_end.flips import Runs
from tests.support.command import last_of_each
from tests.support.elastic_harness import TINY

PERIOD, NEIGHBOURS = 64, 8


class SlowRuns(Runs):
  """Runs whose shares take longer."""

  seconds = 0.0

  def of(self, slices: int, group: int) -> Any:
    config, prog, halves, data = super().of(slices, group)
    return config, prog, dataclasses.replace(halves, sums=SlowSums(halves.sums, self.seconds)), data


class SlowSums:
  """The sums of a share, after some seconds."""

  def __init__(self, sums: Any, seconds: float) -> None:
    self._sums, self._seconds = sums, seconds

  def __call__(self, *arguments: Any) -> Any:
    time.sleep(self._seconds)
    return self._sums(*arguments)

  def __getattr__(self, name: str) -> Any:
    return getattr(self._sums, name)


def interval(found: Sequence[float]) -> str:
  """The mean, and its 95 % interval."""
  draws = np.random.default_rng(0).choice(found, (10_000, len(found))).mean(axis=1)
  low, high = np.percentile(draws, [2.5, 97.5])
  return f"{np.mean(found):.4%} of a step, 95 % interval {low:.4%} to {high:.4%}"


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--steps", type=positive, default=2000)
  parser.add_argument("--shares", type=positive, default=16, help="of a slice")
  parser.add_argument("--seconds", type=float, default=0.02, help="that a share takes longer")
  args = parser.parse_args()
  jax.config.update("jax_platforms", "cpu")
  with tempfile.TemporaryDirectory(prefix="witness-") as folder:
    runs = SlowRuns(Path(folder), last_of_each([*TINY.split(), f"per_device_batch_size={args.shares}"]))
    runs.seconds = args.seconds
    cpu = time.process_time()
    played = runs.play(2, args.shares, 2 * PERIOD, steps=args.steps)
    cpu = time.process_time() - cpu
  assert not played.alarms() and len(played.states()) == 2, played.log
  took = np.diff(played.members[0].began)  # of the steps 1, 2, ...
  pairs, alone = [], []
  for n in range(4 * PERIOD, args.steps - NEIGHBOURS, 2 * PERIOD):  # with a witness, without the first
    before, block = took[n - 2 * PERIOD : n - PERIOD], took[n - PERIOD : n]
    pairs.append(block.mean() / before.mean() - 1)
    usual = statistics.median([*took[n - 1 - NEIGHBOURS : n - 1], *took[n : n + NEIGHBOURS]])
    alone.append((took[n - 1] / usual - 1) / PERIOD)
  print(f"{args.steps} steps of {np.median(took) * 1e3:.1f} ms (median), {args.shares} shares, {len(pairs)} witnesses,")
  print(f"{cpu / args.steps * 1e3:.1f} ms of CPU for a step of both slices, load {os.getloadavg()[0]:.1f}")
  print(f"pairs    {interval(pairs)}")
  print(f"witness  {interval(alone)}")


if __name__ == "__main__":
  main()
