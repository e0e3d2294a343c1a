from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.elastic.batch_plan import PADDING, plan, relative_throughput


@settings(max_examples=300, deadline=None)
@given(n=st.integers(1, 40), m=st.integers(1, 6), units=st.integers(1, 9), ways=st.integers(1, 4), data=st.data())
def test_every_row_is_computed_once_and_no_slice_has_more_than_one_unit_of_padding(n, m, units, ways, data):
  k = data.draw(st.integers(1, n))
  rows = units * ways
  p = plan(n, k, m, rows, ways)
  np.testing.assert_array_equal(np.sort(p.rows[p.rows != PADDING]), np.arange(n * m * rows))
  assert p.rows.dtype == np.int32 and p.padding_share == pytest.approx(1 - n * m * rows / p.rows.size)
  first, *last = p.groups
  assert first.shape[1:] == (k, first[0, 0].size) and first[0, 0].size <= rows  # the memory of the full topology
  assert all(group.shape[:2] == (1, k) and group.shape[2] < first.shape[2] for group in last) and len(last) <= 1
  assert all(group.shape[2] % ways == 0 for group in p.groups)
  assert p.rounds == -(-len(p.rows) // (k * rows))  # no plan has fewer rounds
  of_slices = [np.concatenate([group[:, i].ravel() for group in p.groups]) for i in range(k)]
  for own in of_slices:
    padding = own == PADDING
    assert padding.sum() in (0, ways) and not padding[: len(own) - ways].any()
    assert (np.diff(own[~padding]) == 1).all()
  assert p.units == m * units
  # The bound: the full topology's units of a slice, divided by those of the slice that has the most.
  assert p.relative_throughput == m * units / (len(of_slices[0]) / ways) == relative_throughput(n, k, p.units)
  assert p.relative_throughput >= k / n - 1 / -(-n * m * units // k)


@pytest.mark.parametrize(("n", "k", "m", "r"), [(3, 0, 1, 1), (3, 4, 1, 1), (3, 1, 0, 1), (3, 1, 1, 0)])
def test_impossible_plans_are_refused(n, k, m, r):
  with pytest.raises(ValueError, match="at least 1"):
    plan(n, k, m, r)
