"""Assigns the rows of the global batch to the living slices, so that every step trains on the same examples.

The global batch is cut once, for the life of the run, into N*m micro-batches of R rows: m for each of the N slices of
the full topology. With k slices alive the same micro-batches are divided among k slices in ceil(N*m/k) rounds. A slice
with no micro-batch left in a round computes rows of weight 0. The shape of a micro-batch never depends on k, and no row
is dropped or repeated.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

PADDING = -1


@dataclass(frozen=True)
class BatchPlan:
  """The work of one optimizer step on k living slices."""

  rows: np.ndarray  # int32 [rounds, k, R]: index into the global batch, or PADDING
  micro_batches: int  # rounds: micro-batches that each slice computes, one after the other
  padding_share: float  # share of the computed rows that are padding
  relative_throughput: float  # steps per second divided by the full topology's, counting only computation

  @property
  def alive(self) -> int:
    """k"""
    return self.rows.shape[1]


def plan(total: int, alive: int, micro_batches: int, rows_per_micro: int) -> BatchPlan:
  """Returns the plan for `alive` of `total` slices. The full topology computes `micro_batches` per slice and step, and
  its slice i the rows [i*m*R, (i+1)*m*R), in order."""
  if not 1 <= alive <= total:
    raise ValueError(f"{alive} living slices of {total}: at least 1 and at most {total} must be alive")
  if micro_batches < 1 or rows_per_micro < 1:
    raise ValueError(f"{micro_batches} micro-batches of {rows_per_micro} rows: both must be at least 1")
  count = total * micro_batches
  rounds = -(-count // alive)
  rows = np.full((rounds, alive, rows_per_micro), PADDING, np.int32)
  first = 0
  for i in range(alive):
    own = count // alive + (i < count % alive)  # shares differ by at most one micro-batch
    start = first * rows_per_micro
    rows[:own, i] = np.arange(start, start + own * rows_per_micro, dtype=np.int32).reshape(own, rows_per_micro)
    first += own
  return BatchPlan(rows, rounds, 1 - count / (rounds * alive), micro_batches / rounds)


def table(total: int, micro_batches: int) -> list[BatchPlan]:
  """Returns the plans with 1..total slices alive and one row in a micro-batch, for what a step costs."""
  return [plan(total, alive, micro_batches, 1) for alive in range(1, total + 1)]
