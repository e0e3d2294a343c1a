"""Preflight's table of slices as processes, compared with what the protocol deals out."""

from __future__ import annotations

import pytest

from trainer.preflight import findings
from worlds.exchange.plan import pieces
from worlds.membership.dealing import deal


@pytest.mark.parametrize("total, shares", [(3, 1), (4, 2), (8, 8)])
def test_the_table_has_the_dealing_of_every_number_of_slices(total, shares):
  _, *rows = findings.process_lines(total, shares, 10**9, 10**9)
  assert len(rows) == total
  full = deal(total * shares, list(range(total)), shares)
  for row in rows:
    alive, most, speed, held, sent = (column.strip() for column in row.split("|"))
    k = int(alive.split()[0])
    dealt = deal(total * shares, list(range(k)), shares, full)
    most_shares = max(map(len, dealt.values()))
    assert int(most) == most_shares and speed == f"{shares / most_shares:.1%}"
    groups, others = divmod(most_shares, shares)
    count = groups + others
    assert max(len(pieces(own, shares)) for own in dealt.values()) <= count
    assert held == findings.size(count * 10**9)
    assert sent == findings.size((count + 1) * 10**9 * (k - 1) / k)
