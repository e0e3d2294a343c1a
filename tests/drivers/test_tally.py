"""The examples of a step are counted by the processes that read them: nobody reads the rows of another one."""

from __future__ import annotations

from collections import Counter

import jax
import numpy as np
import pytest
from tests.drivers.member_threads import STEPS, Runs
from tests.support.elastic_harness import TINY
from tests.support.seeds import few

from input_pipeline.tally import Tally
from trainer.drivers.many_worlds import ManyWorlds
from trainer.models import experts

MOE = ("num_experts=2", "num_experts_per_tok=1", "base_moe_mlp_dim=16")


@pytest.mark.parametrize("group", few([2], [1, 2]))
def test_members_read_each_row_once_and_their_sums_are_the_whole_batch(tmp_path, monkeypatch, group):
  """The balance loss of experts needs the weights of the whole batch, and the receipt its digest."""
  runs = Runs(tmp_path, [*TINY.split(), *MOE])
  _, _, _, data = runs.of(3, group)
  expected = [data.train.tally(index, hashes=True) for index in range(STEPS)]
  read: Counter[tuple[int, int]] = Counter()
  found: list[list[Tally]] = [[] for _ in range(STEPS)]
  batch, step = data.train.batch, ManyWorlds.step

  def reading(index, rows=None):
    read.update((index, int(row)) for row in rows)
    return batch(index, rows)

  def stepping(driver, state, n):
    result = step(driver, state, n)
    found[n - 1].append(Tally.of_sum(driver.tally))
    assert driver._counted_ahead == (None if n == STEPS else (n, expected[n]))
    return result

  monkeypatch.setattr(data.train, "batch", reading)
  monkeypatch.setattr(ManyWorlds, "step", stepping)
  assert len(runs.play(3, group, STEPS + 1).states()) == 3
  assert found == [[one] * 3 for one in expected]
  # The first step of each process reads all rows: nobody has counted them before.
  assert {read[key] for key in read if key[0] > 0} == {1}, read
  assert np.isfinite(expected[0].mean_weight) and len({key for key in read if key[0] == 1}) == data.global_batch_size


@pytest.mark.soak
def test_counts_of_tokens_of_experts_travel_unrounded_with_gradients_in_bfloat16(tmp_path, monkeypatch):
  """In bfloat16, 771 tokens are 772."""
  step, loads = ManyWorlds.step, []

  def stepping(driver, state, n):
    result = step(driver, state, n)
    loads.append(jax.device_get(experts.only_loads(result[0].params)))
    return result

  monkeypatch.setattr(ManyWorlds, "step", stepping)
  for dtype in ("float32", "bfloat16"):
    keys = [*TINY.split(), *MOE, "max_target_length=64", "per_device_batch_size=8", f"grad_reduce_dtype={dtype}"]
    Runs(tmp_path / dtype, keys).play(3, 1, STEPS + 1, steps=1)
  (first, *others) = loads
  assert len(others) == 5 and jax.tree.leaves(first)
  for other in others:
    jax.tree.map(np.testing.assert_array_equal, first, other)
