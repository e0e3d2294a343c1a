"""Assigns the rows of the global batch to the living slices, so that every step trains on the same examples.

A slice of the full topology computes m micro-batches of R rows in a step. Its unit of work is W rows: one row for each
of the W groups of devices that share the rows of a slice. So a slice of the full topology has U = m*R/W units, and with
k of N slices alive, no slice computes more than ceil(N*U/k) units: at most one of them is padding, rows of weight 0. A
slice computes its units in rounds of at most R rows, which is what its memory is made for. All rounds have the same
number of rows, except that the last one may be smaller. No row is dropped or repeated.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

PADDING = -1


@dataclass(frozen=True)
class BatchPlan:
  """The work of one optimizer step on k living slices."""

  groups: tuple[np.ndarray, ...]
  """Rounds of equal size, then perhaps one smaller last round: int32 [rounds, k, rows of a slice and round], indices
  into the global batch, or PADDING."""
  units: int  # U
  padding_share: float  # share of the computed rows that are padding
  relative_throughput: float  # steps per second divided by the full topology's, counting only computation

  @property
  def rounds(self) -> int:
    """Micro-batches that each slice computes, one after the other."""
    return sum(len(group) for group in self.groups)

  @property
  def rows(self) -> np.ndarray:
    """All groups, flat: int32 [computed rows]."""
    return np.concatenate([group.reshape(-1) for group in self.groups])

  @property
  def ranges(self) -> list[list[list[int]]]:
    """For each slice, the ranges [first, end) of its rows: one range, because `plan` deals them in order."""
    own = [np.concatenate([group[:, i].ravel() for group in self.groups]) for i in range(self.groups[0].shape[1])]
    return [[[int(rows[0]), int(rows.max()) + 1]] for rows in own]


def plan(total: int, alive: int, micro_batches: int, rows: int, ways: int = 1) -> BatchPlan:
  """Returns the plan for `alive` of `total` slices. The full topology computes `micro_batches` of `rows` rows per slice
  and step, and its slice i the i-th part of the batch, in order. ways: groups of devices that share a slice's rows (W).
  """
  if not 1 <= alive <= total:
    raise ValueError(f"{alive} living slices of {total}: at least 1 and at most {total} must be alive")
  if micro_batches < 1 or rows < 1:
    raise ValueError(f"{micro_batches} micro-batches of {rows} rows: both must be at least 1")
  if ways < 1 or rows % ways:
    raise ValueError(f"{rows} rows do not divide by {ways} ways")
  units = micro_batches * rows // ways
  most = -(-total * units // alive)  # units of a slice
  rounds = -(-most * ways // rows)
  size = -(-most // rounds)  # units of a round, except perhaps the last one
  dealt = np.full((alive, most * ways), PADDING, np.int32)
  first = 0
  for i in range(alive):
    count = (total * units // alive + (i < total * units % alive)) * ways  # slices differ by at most one unit
    dealt[i, :count] = np.arange(first, first + count)
    first += count
  smaller = most % size > 0
  equal = rounds - smaller
  cut = equal * size * ways
  groups = [dealt[:, :cut].reshape(alive, equal, -1), *([dealt[:, None, cut:]] if smaller else [])]
  groups = [group.transpose(1, 0, 2) for group in groups if group.size]
  return BatchPlan(tuple(groups), units, 1 - first / dealt.size, relative_throughput(total, alive, units))


def relative_throughput(total: int, alive: int, units: int) -> float:
  """Returns `BatchPlan.relative_throughput` of a plan whose slices have `units` units on the full topology."""
  return units / -(-total * units // alive)
