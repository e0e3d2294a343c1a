"""Replicas that two members compute in turns: all members compute equally long, and no replica is in two places."""

from __future__ import annotations

import random

import pytest

from worlds.membership.dealing import Dealing, deal, slow_steps, turns
from worlds.membership.messages import slow_line
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
  found = turns(dealt, steps, {})
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
  assert turns({0: [0, 1, 2], 1: [3]}, 10, {}) == [] == turns({0: [0, 1], 1: [2]}, 1, {})


@pytest.mark.parametrize("seed", range(60))
def test_slow_members_take_few_steps_and_nobody_waits_for_them(seed):
  chance = random.Random(seed)
  steps, members = chance.randrange(8, 100), range(chance.randrange(2, 12))
  slow = chance.sample(members, chance.randrange(1, len(members) // 2 + 1))
  speeds = {member: 1 / chance.uniform(1.2, 6) if member in slow else 1.0 for member in members}
  shares = len(members) + chance.randrange(3)
  dealt = deal(shares, members, 1, speeds=speeds)
  few = slow_steps(dealt, steps, speeds)
  found = turns(dealt, steps, few)
  assert few.keys() in (set(), set(slow)) and all(0 < takes <= steps for takes in few.values())
  whole = max(len(has) / speeds[member] for member, has in dealt.items())
  alone = -(-shares // (len(members) - len(slow)))  # the time without the slow members, without turns
  took = played(dealt, steps, speeds, found) / steps
  assert took <= whole + 1e-9 and (bool(few) or whole <= alone + 1)
  if len(slow) == 1 and found:  # not more than without the slow member, but for the rounding to steps
    assert took <= max(1.0, shares / (len(members) - 1)) + 2 / min(speeds.values()) / steps


def played(dealt, steps, speeds, found):
  """The time of a round, in steps of a member that is not slow: each takes its turns as a helper, its whole replicas,
  then the replica that another one has begun. Asserts that each step is computed once."""
  helped = {turn.share: turn for turn in found}
  assert len(helped) == len(found) == len({turn.member for turn in found}) == len({turn.helper for turn in found})
  sent, done = dict[int, float](), dict[int, float]()
  for turn in found:
    assert 0 < turn.steps < steps and dealt[turn.member][-1] == turn.share
    sent[turn.share] = turn.steps / speeds[turn.helper]
  for member, shares in dealt.items():
    now = sum(sent[turn.share] for turn in found if turn.helper == member)
    for share in shares:
      now = max(now, sent.get(share, 0.0))
      now += (steps - (helped[share].steps if share in helped else 0)) / speeds[member]
    done[member] = now
  return max(done.values())


def test_one_of_eight_members_with_half_the_speed_costs_a_share_and_not_half():
  """The coordinator's rules: it is named with its steps, gets few of them, and its whole replica when it is fast."""
  dealing = Dealing(RunRules(8, 1, 8, local_steps=32))
  dealing.deal(range(8), keeps=False)
  factors, told = dict.fromkeys(range(8), 1.0) | {3: 2.0}, []

  def rounds(numbers):
    for number in numbers:
      computed = dict.fromkeys(range(8), 1.0)
      for turn in turns(dealing.dealt, 32, dealing.slow_steps):
        computed[turn.member] -= turn.steps / 32
        computed[turn.helper] += turn.steps / 32
      seconds = {member: number * factors[member] for member, number in computed.items()}
      told.extend(dealing.computed(32 * number, seconds, in_turns=True))
      if dealing.better():
        dealing.speeds.dealt()
        dealing.deal(range(8), keeps=False)
        told.extend(dealing.moved())
      yield max(seconds.values())

  times = list(rounds(range(1, 60)))
  assert times[0] == 2.0 and times[-1] == 37 / 32 and dealing.slow_steps == {3: 2}
  assert [slow_line(one) for one in told] == [
    "Slice 3 computes a share in 2.00 times the median since step 32. It takes the last 2 steps of its replica in each "
    "round, and faster slices take the others."
  ]
  factors[3] = 1.0
  assert list(rounds(range(60, 130)))[-1] == 1.0 and dealing.slow_steps == {}
  assert [one["factor"] for one in told[1:]] == [1.0] and told[-1]["steps"] == 0
  assert slow_line(told[-1]).endswith("as fast as the others again, from step 2304 on. It has 1 of 1 shares.")


@pytest.mark.parametrize("in_turns", [True, False])
def test_members_that_compute_in_turns_are_not_slow(in_turns):
  """Both take 15 steps of 3 replicas of 10. Counted by whole replicas, the second one would have half the speed."""
  dealing = Dealing(RunRules(3, 1, 3, local_steps=10))
  dealing.deal([0, 1], keeps=False)
  told = [dealing.computed(step, {0: 1.5, 1: 1.5}, in_turns=in_turns) for step in range(1, 40)]
  assert any(told) != in_turns
