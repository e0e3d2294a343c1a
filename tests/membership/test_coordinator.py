"""The protocol of membership, in every order of events that a seed can produce."""

from __future__ import annotations

import pytest
from tests.membership.protocol_model import Model

from trainer.membership.messages import deal

STEPS = 7
EVERY_ROUND = [name for n in range(1, STEPS + 1) for name in ([f"step {n}"] + [f"eval {n}"] * (n % 3 == 0))]


def test_an_undisturbed_run_applies_every_round_once():
  model = Model(0)
  assert model.run(faults=0.0) == 0
  assert model.applied == EVERY_ROUND


@pytest.mark.parametrize("total, spares, minimum", [(3, 0, 1), (3, 1, 1), (4, 2, 2), (3, 0, 3), (1, 0, 1), (2, 1, 2)])
def test_no_order_of_faults_loses_or_repeats_a_round(total, spares, minimum):
  kills = leaves = 0
  for seed in range(150):
    model = Model(seed, total=total, spares=spares, minimum=minimum)
    code = model.run(faults=(0.005, 0.02, 0.1)[seed % 3])
    assert code == 0, (seed, code)
    assert model.applied == EVERY_ROUND, (seed, model.applied)
    kills += model.kills
    leaves += model.leaves
  assert kills > 100 and leaves > 50, "the faults did not happen"


def test_a_stop_ends_at_one_step_with_the_state_saved():
  for seed in range(100):
    model = Model(seed, steps=10**6)
    for _ in range(300 + seed):
      model.event(0.01)
    model.carry_out(model.coordinator.stop())
    assert model.run(faults=0.01, most_faults=20) == 42, seed
    # Nothing that any member has applied is missing in the checkpoint.
    assert model.checkpoint == model.applied, seed


def test_shares_are_dealt_evenly():
  assert deal(5, [7, 2]) == {2: [0, 1, 2], 7: [3, 4]}
  assert deal(2, [0, 1, 2]) == {0: [0], 1: [1], 2: []}


def test_a_member_keeps_the_shares_that_it_has_computed():
  before = deal(6, [0, 1, 2])
  assert deal(6, [1, 2], before) == {1: [0, 2, 3], 2: [1, 4, 5]}
  assert deal(6, [0, 1, 2], {1: [0, 2, 3], 2: [1, 4, 5]}) == {0: [3, 5], 1: [0, 2], 2: [1, 4]}
  assert deal(4, [1, 2, 3], {0: [0, 1], 1: [2, 3]}) == {1: [2, 3], 2: [0], 3: [1]}


@pytest.mark.parametrize("shares, members", [(1, 1), (3, 2), (7, 3), (8, 8), (5, 4)])
def test_every_share_is_dealt_once_after_any_change(shares, members):
  before: dict[int, list[int]] = {}
  for count in (members, 1, members, max(1, members - 1)):
    before = deal(shares, list(range(count)), before)
    assert sorted(share for own in before.values() for share in own) == list(range(shares))
    sizes = [len(own) for own in before.values()]
    assert max(sizes) - min(sizes) <= 1
