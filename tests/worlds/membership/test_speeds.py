"""Slow members: when they are named, when shares move, and when a spare takes the place of one."""

from __future__ import annotations

import random

import pytest

from worlds.membership.coordinator import Coordinator
from worlds.membership.effects import Effect, Effects, Kill, Note, Send
from worlds.membership.messages import slow_line
from worlds.membership.run_rules import RunRules


class Steps:
  """Steps of a run of eight members with eight shares each; `factors` are the seconds for a share."""

  def __init__(self, group: int = 8, slow_factor: float = 0.0) -> None:
    self.run = Coordinator(RunRules(8, 1, 8 * group, 1e9, slow_factor=slow_factor), clock=lambda: 0.0)
    self.factors = dict.fromkeys(range(9), 1.0)
    self.step = 0
    for member in range(8):
      self.joins(member)
    self.run.restored(self.run.primary, 0, self.run.epoch, 0)
    for member in range(8):
      self.run.joined(member, 0, self.run.epoch)

  def joins(self, member: int, host: str = "host") -> None:
    self.run.hello(member, 0, 1, f"{host}:1024")
    self.run.ready(member, 0, self.step)

  def do(self, noise: random.Random | None = None) -> Effects:
    self.step += 1
    effects: Effects = []
    for member in sorted(self.run.active):
      each = self.factors[member] * (noise.uniform(0.9, 1.1) if noise else 1.0)
      self.run.computed(member, self.run.epoch, each * len(self.run._dealing.dealt[member]))
    for member in sorted(self.run.active):
      effects += self.run.done(member, 0, self.run.epoch, f"step {self.step}", 7)
    return effects

  def notes(self, steps: int, noise: random.Random | None = None) -> list[tuple[int, str]]:
    """What the log says: the supervisor's notes, and what its primary writes of the members."""
    found = [(self.step, effect) for _ in range(steps) for effect in self.do(noise)]
    texts = [(step, effect.text if isinstance(effect, Note) else self.written(effect)) for step, effect in found]
    return [(step, text) for step, text in texts if text]

  def written(self, effect: Effect) -> str:
    is_slow = isinstance(effect, Send) and effect.message["kind"] == "slow" and effect.member == self.run.primary
    return slow_line(effect.message) if is_slow else ""

  @property
  def numbers(self) -> list[int]:
    return [len(self.run._dealing.dealt[member]) for member in sorted(self.run.active)]


@pytest.mark.parametrize("factor, numbers", [(2.0, 4), (1.3, 6)])
def test_a_slow_member_is_named_within_twenty_steps_and_its_shares_move_and_return(factor, numbers):
  steps = Steps()
  assert steps.notes(30) == [] and steps.numbers == [8] * 8
  steps.factors[3] = factor
  (named, moved) = steps.notes(20)
  assert named[1] == (
    f"Slice 3 computes a share in {factor:.2f} times the median since step 31. It has {numbers} of 8 shares."
  )
  assert moved[1].startswith("Work moves") and named[0] <= 50
  assert steps.numbers[3] == numbers and max(steps.numbers) == 9 and sum(steps.numbers) == 64
  epoch = steps.run.epoch
  assert steps.notes(100) == [] and steps.run.epoch == epoch  # the seconds for a share stay, so nothing more moves
  steps.factors[3] = 1.0
  notes = steps.notes(40)
  (usual,) = (step for step, text in notes if text.startswith("Slice 3 is as fast as the others again"))
  assert usual <= 170 and steps.numbers == [8] * 8


def test_with_one_share_a_slice_a_slow_member_is_named_and_keeps_its_share():
  steps = Steps(group=1)
  steps.notes(5)
  steps.factors[3] = 1.5
  ((_, text),) = steps.notes(60)
  assert text == (
    "Slice 3 computes a share in 1.50 times the median since step 6. "
    "It keeps its share; with a larger shares_per_slice, faster slices take a part of its work."
  )
  assert steps.numbers == [1] * 8 and steps.run.epoch == 2


@pytest.mark.parametrize("waits", [True, False])
def test_a_slow_member_is_replaced_if_a_spare_waits(waits):
  steps = Steps(slow_factor=1.5)
  if waits:
    steps.joins(8)
  steps.factors[3] = 2.0
  kills = [effect for _ in range(120) for effect in steps.do() if isinstance(effect, Kill)][:1]
  assert [(kill.member, kill.reason) for kill in kills] == [
    (3, "it computes a share in 2.00 times the median since step 1, and a spare waits")
  ] * waits
  if waits:
    steps.run.lost(3, kills[0].reason)
    assert sorted(steps.run.active) == [0, 1, 2, 4, 5, 6, 7, 8]
    steps.notes(21)  # the round under way keeps its shares; then they are levelled
    assert steps.numbers == [8] * 8


def test_a_commit_says_whether_an_epoch_follows():
  """A member that began to compute before it knows of the epoch would hold up all others."""
  steps = Steps()
  commits = lambda: {effect.message["changes"] for effect in steps.do() if effect.message["kind"] == "commit"}
  assert commits() == {False}
  steps.run.lost(5, "killed")
  steps.joins(5)
  assert commits() == {True} and commits() == {False}


def test_a_round_under_way_keeps_the_shares_that_members_may_have_computed():
  """Member 3 is known to be slow, but shares have not moved yet, when another member is lost."""
  steps = Steps()
  steps.notes(1)
  steps.run._dealing.speeds.dealt()  # shares do not move in the next steps
  steps.factors[3] = 2.0
  steps.notes(17)
  before = {member: set(own) for member, own in steps.run._dealing.dealt.items()}
  assert len(before[3]) == 8
  steps.run.lost(5, "killed")
  assert all(before[member] <= set(own) for member, own in steps.run._dealing.dealt.items())
  steps.notes(20)
  assert steps.numbers[3] == 4


def test_a_member_that_has_just_become_fast_again_is_not_replaced():
  steps = Steps(slow_factor=1.5)
  steps.joins(8)
  steps.factors[3] = 2.0
  effects = [effect for _ in range(50) for effect in steps.do()]
  steps.factors[3] = 1.0
  effects += [effect for _ in range(30) for effect in steps.do()]
  assert not [effect for effect in effects if isinstance(effect, Kill)]
