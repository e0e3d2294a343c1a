"""Which source of a mixture gives which example: proportional to integer shares, and computed from the index."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

_LONGEST_PERIOD = 10_000


class Schedule:
  """A periodic order of sources in which each has its share of the examples.

  In a period of P = sum(shares) examples, source k has exactly shares[k]. Among the first n examples, for every n, the
  number of examples of source k differs from n shares[k] / P by less than 1. So over any range of examples it differs
  by less than 2; with two sources, by at most 1.

  The order is the earliest-deadline-first order of Pfair scheduling (Baruah, Cohen, Plaxton and Varvel, Algorithmica
  15, 1996): example j of source k (from 0) has its place in [floor(j / s), ceil((j + 1) / s)), with s = shares[k] / P.
  """

  def __init__(self, shares: Sequence[int]) -> None:
    """`shares`: at least 1 each."""
    assert shares and min(shares) >= 1, shares
    self.shares = tuple(shares)
    self.period = sum(shares)
    self._source = np.zeros(self.period, np.int32)  # of each place in the period
    self._places: list[np.ndarray] = [np.zeros(share, np.int32) for share in shares]  # of each source, ascending
    done = [0] * len(shares)
    waiting = [(0, number) for number in range(len(shares))]  # (first place allowed, source), a heap
    ready: list[tuple[int, int]] = []  # (place before which the example must come, source), a heap
    for place in range(self.period):
      while waiting and waiting[0][0] <= place:
        _, number = heapq.heappop(waiting)
        heapq.heappush(ready, (-(-(done[number] + 1) * self.period // shares[number]), number))
      deadline, number = heapq.heappop(ready)
      assert place < deadline, (place, deadline)
      self._source[place] = number
      self._places[number][done[number]] = place
      done[number] += 1
      if done[number] < shares[number]:
        heapq.heappush(waiting, (done[number] * self.period // shares[number], number))

  def locate(self, index: int) -> tuple[int, int]:
    """(source of example `index` >= 0, number of examples of this source before it)."""
    round_number, place = divmod(index, self.period)
    number = int(self._source[place])
    return number, round_number * self.shares[number] + int(np.searchsorted(self._places[number], place))

  def counts(self, index: int) -> list[int]:
    """Number of examples of each source before example `index`."""
    round_number, place = divmod(index, self.period)
    return [
      round_number * share + int(np.searchsorted(places, place)) for share, places in zip(self.shares, self._places)
    ]

  def index_of(self, number: int, count: int) -> int:
    """Index of example `count` (from 0) of source `number`."""
    round_number, rest = divmod(count, self.shares[number])
    return round_number * self.period + int(self._places[number][rest])


def shares(weights: Sequence[Fraction]) -> list[int]:
  """Integer shares, at least 1 each, in proportion to the weights.

  Exact if the period is at most 10,000 examples. Otherwise the shares are of 10,000, rounded so that each differs by
  less than one from its exact value (largest remainders), except that no share is 0.
  """
  total = sum(weights)
  exact = [weight / total for weight in weights]
  period = math.lcm(*(share.denominator for share in exact))
  if period <= _LONGEST_PERIOD:
    return [int(share * period) for share in exact]
  wanted = [share * _LONGEST_PERIOD for share in exact]
  rounded = [math.floor(share) for share in wanted]
  by_remainder = sorted(range(len(wanted)), key=lambda number: (rounded[number] - wanted[number], number))
  for number in by_remainder[: _LONGEST_PERIOD - sum(rounded)]:
    rounded[number] += 1
  return [max(1, share) for share in rounded]
