"""A tally of rows: it adds up exactly, and shows an example that is missing, doubled, moved or changed."""

from __future__ import annotations

import functools
import operator

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from input_pipeline import tally
from input_pipeline.batch import Batch
from input_pipeline.tally import Tally

B, T = 6, 8


def batch(seed: int = 0) -> Batch:
  chance = np.random.default_rng(seed)
  ints = chance.integers(0, 9, (4, B, T), np.int32)
  ints[3] = chance.integers(0, 3, (B, T))  # segment 0 is padding
  return Batch(ints[0], ints[1], chance.random((B, T), np.float32), ints[2], ints[3])


def of(rows: list[int], whole: Batch) -> Tally:
  return tally.of_rows(rows, Batch(*(field[rows] for field in whole)), hashes=True)


@settings(max_examples=60, deadline=None)
@given(st.permutations(range(B)), st.sets(st.integers(1, B - 1)), st.integers(0, 3))
def test_the_sum_does_not_depend_on_who_has_which_rows(order, cuts, padding):
  whole = batch()
  parts = [part.tolist() for part in np.split(np.array(order), sorted(cuts))]
  tallies = [of([*part, *[-1] * padding], whole) for part in parts]
  added = functools.reduce(np.add, [one.numbers for one in tallies])
  assert added.dtype == np.float32
  assert functools.reduce(operator.add, tallies) == of(list(range(B)), whole)
  assert Tally.of_sum(added) == of(list(range(B)), whole)


def test_it_is_exact_for_the_most_shares_of_the_largest_numbers():
  most = Tally(2**128 - 1, 2**62, 2**40)
  total = Tally.of_sum(np.add.reduce(np.tile(most.numbers, (65536, 1)), dtype=np.float32))
  assert total == Tally((2**128 - 1) * 65536 % 2**128, 2**62 * 65536, 2**40 * 65536)


def test_a_row_that_is_missing_doubled_moved_or_changed_shows():
  whole, changed = batch(), batch()
  changed.weights[3, 5] += 1
  rows = list(range(B))
  moved = Batch(*(field[::-1] for field in whole))
  others = [of(rows[1:], whole), of([*rows, 2], whole), of(rows, changed), of(rows, moved)]
  assert len({one.digest for one in [of(rows, whole), *others]}) == 5


def test_the_mean_weight_is_that_of_the_tokens_without_padding():
  whole = batch()
  expected = whole.weights.sum(dtype=np.float64) / np.count_nonzero(whole.segment_ids)
  assert abs(of(list(range(B)), whole).mean_weight - expected) < 1e-9
  assert tally.of_rows(range(B), whole, hashes=False).digest == 0
  assert Tally().mean_weight == 0
