from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.elastic.batch_plan import PADDING, plan, table

SIZES = [(n, k, m) for n in range(1, 17) for k in range(1, n + 1) for m in range(1, 9)]


@pytest.mark.parametrize("rows_per_micro", [1, 3])
def test_every_row_is_computed_exactly_once(rows_per_micro):
  for n, k, m in SIZES:
    p = plan(n, k, m, rows_per_micro)
    total = n * m * rows_per_micro
    assert p.rows.shape == (p.micro_batches, k, rows_per_micro) and p.rows.dtype == np.int32
    np.testing.assert_array_equal(np.sort(p.rows[p.rows != PADDING]), np.arange(total))
    assert p.padding_share == pytest.approx(1 - total / p.rows.size)
    assert p.micro_batches == -(-n * m // k)  # no plan has fewer rounds
    # a micro-batch is all rows or all padding, and is never cut
    kinds = (p.rows == PADDING).sum(axis=2)
    assert set(np.unique(kinds)) <= {0, rows_per_micro}
    whole = p.rows[kinds == 0]
    assert (whole[:, 0] % rows_per_micro == 0).all() and (np.diff(whole, axis=1) == 1).all()


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 64), st.data())
def test_work_is_level_and_a_pure_function(n, data):
  k = data.draw(st.integers(1, n))
  m = data.draw(st.integers(1, 32))
  p = plan(n, k, m, 2)
  busy = (p.rows[:, :, 0] != PADDING).sum(axis=0)
  assert busy.max() - busy.min() <= 1
  np.testing.assert_array_equal(p.rows, plan(n, k, m, 2).rows)


def test_the_full_topology_takes_its_own_shares_in_order_without_padding():
  p = plan(3, 3, 2, 4)
  assert p.padding_share == 0 and p.relative_throughput == 1
  for i in range(3):
    np.testing.assert_array_equal(p.rows[:, i].ravel(), np.arange(8) + 8 * i)


def test_three_slices_on_two_by_hand():
  p = plan(3, 2, 1, 2)
  np.testing.assert_array_equal(p.rows, [[[0, 1], [4, 5]], [[2, 3], [PADDING, PADDING]]])
  assert (p.micro_batches, p.padding_share, p.relative_throughput) == (2, 0.25, 0.5)


def test_table_lists_every_k():
  rows = table(3, 2)
  assert [(r.alive, r.micro_batches) for r in rows] == [(1, 6), (2, 3), (3, 2)]
  assert [r.padding_share for r in rows] == [0, 0, 0]
  assert [r.relative_throughput for r in rows] == pytest.approx([1 / 3, 2 / 3, 1])


@pytest.mark.parametrize(("n", "k", "m", "r"), [(3, 0, 1, 1), (3, 4, 1, 1), (3, 1, 0, 1), (3, 1, 1, 0)])
def test_impossible_plans_are_refused(n, k, m, r):
  with pytest.raises(ValueError, match="at least 1"):
    plan(n, k, m, r)
