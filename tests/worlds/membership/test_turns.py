"""Replicas that two members compute in turns: all members compute equally long, and no replica is in two places."""

from __future__ import annotations

import random

import pytest

from worlds.membership.dealing import Dealing, deal, turns
from worlds.membership.run_rules import RunRules


@pytest.mark.parametrize("seed", range(40))
def test_every_member_computes_equally_long_and_each_step_once(seed):
  chance = random.Random(seed)
  slices, steps = chance.randrange(2, 12), chance.randrange(2, 100)
  replicas, members = (
    slices * chance.choice([1, 1, 2, 3]),
    sorted(chance.sample(range(20), chance.randrange(1, slices + 1))),
  )
  dealt = deal(replicas, members, 1)
  found = turns(dealt, steps)
  assert bool(found) == (replicas % len(members) > 0)
  for member, shares in dealt.items():
    last = [turn for turn in found if turn.member == member]
    first = [turn for turn in found if turn.helper == member]
    assert len(last) <= 1 and len(first) <= 1 and all(turn.share == shares[-1] for turn in last)
    work = len(shares) * steps + sum(turn.steps for turn in first) - sum(turn.steps for turn in last)
    assert replicas * steps // len(dealt) <= work <= -(-replicas * steps // len(dealt))
    # The helper begins with these steps, so they are done when the member needs them, at the end of its other work.
    assert all(0 < turn.steps <= work - (steps - turn.steps) for turn in last)


def test_dealings_that_are_not_level_have_no_turns():
  assert turns({0: [0, 1, 2], 1: [3]}, 10) == [] == turns({0: [0, 1], 1: [2]}, 1)


@pytest.mark.parametrize("in_turns", [True, False])
def test_members_that_compute_in_turns_are_not_slow(in_turns):
  """Both take 15 steps of 3 replicas of 10. Counted by whole replicas, the second one would have half the speed."""
  dealing = Dealing(RunRules(3, 1, 3, local_steps=10))
  dealing.deal([0, 1], keeps=False)
  told = [dealing.computed(step, {0: 1.5, 1: 1.5}, in_turns=in_turns) for step in range(1, 40)]
  assert any(told) != in_turns
