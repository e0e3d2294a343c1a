"""Preflight's table of slices as processes, compared with what the protocol deals out."""

from __future__ import annotations

import pytest

from trainer.preflight import report
from worlds.membership.messages import deal


@pytest.mark.parametrize("total, micro_batches", [(3, 1), (4, 2), (5, 3)])
def test_the_table_has_the_dealing_of_every_number_of_slices(total, micro_batches):
  _, *rows = report.process_lines(total, micro_batches, 10**9, 10**9)
  assert len(rows) == 2 * total
  for row in rows:
    numerics, alive, rounds, speed, held, sent = (column.strip() for column in row.split("|"))
    k = int(alive.split()[0])
    balanced = numerics == "balanced"
    units = total * micro_batches if balanced else total
    most = max(map(len, deal(units, list(range(k))).values()))
    assert int(rounds) == most * (1 if balanced else micro_batches)
    assert speed == f"{micro_batches / int(rounds):.1%}"
    assert held == report.size(most * 10**9)
    if k == 1:
      assert sent == report.size(0)
