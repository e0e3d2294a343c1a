"""Preflight's table of slices as processes, compared with what the protocol deals out."""

from __future__ import annotations

import jax
import pytest

from trainer.config.load import load
from trainer.preflight import findings
from trainer.program.state import TrainState
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


@pytest.mark.parametrize("step_seconds, shown", [(0.5, "steps of 500.0 ms"), (0.0, "steps of 1 s (no estimate")])
def test_the_table_of_local_steps_has_a_row_for_each_link(step_seconds, shown):
  keys = (
    "configs/base.yml run_name=t base_output_directory=unused cluster=multiprocess num_slices=4 elastic_enabled=true"
  )
  config = load([*keys.split(), "local_steps=20", "dataset_type=synthetic"], check_paths=False)
  weights = jax.ShapeDtypeStruct((10**6,), "float32")
  state = TrainState(step=None, params=weights, opt_state=[weights, weights], skipped=None)
  first, title, *rows = findings.local_steps_lines(config, state, 4, step_seconds)
  sent = 2 * 3 / 4 * 4e6  # bytes of one array, 4 slices
  assert f"sends {findings.size(3 * sent)} in a round of 20 steps, and {findings.size(sent)} in a synchronous" in first
  assert shown in title and title.endswith("H=1 | H=10 | H=20 | H=36 | H=100")
  for gigabits, row in zip((1, 10, 100), rows, strict=True):
    for (count, arrays), share in zip(((1, 1), (10, 3), (20, 3), (36, 3), (100, 3)), row.split(" | ")[1:], strict=True):
      exchange = 8 * arrays * sent / (gigabits * 1e9)
      assert share == f"{exchange / (exchange + count * (step_seconds or 1)):.1%}"
