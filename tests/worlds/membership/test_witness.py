"""What a witness compares, and what follows from the sums."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worlds.membership.coordinator import Coordinator
from worlds.membership.dealing import deal
from worlds.membership.effects import Send
from worlds.membership.failures import Failures
from worlds.membership.run_rules import RunRules
from worlds.membership.witness import Witness, draw

RIGHT, WRONG, OTHER = {"w": [7, 3], "b": [1, 1]}, {"w": [9, 5], "b": [1, 1]}, {"w": [8, 4], "b": [1, 1]}


@settings(deadline=None, max_examples=50)
@given(st.integers(2, 6), st.integers(1, 8), st.integers(0, 2**40), st.integers(0, 50))
def test_every_share_is_compared_once_in_as_many_checks_as_there_are_shares(members, group, seed, cycle):
  shares = members * group
  dealt = deal(shares, range(members), group)
  drawn = [draw(seed, check, dealt) for check in range(cycle * shares, (cycle + 1) * shares)]
  assert sorted(one.share for one in drawn) == list(range(shares))
  assert all(one.share in dealt[one.members[0]] and len(set(one.members)) == 2 for one in drawn)


@pytest.mark.parametrize(
  "sums, alike, kind, members",
  [
    ({0: RIGHT, 1: RIGHT}, {0, 1, 2}, "equal", ()),
    ({0: RIGHT, 1: WRONG}, {0, 1, 2, 3}, "ask", (2,)),
    ({0: RIGHT, 1: WRONG, 2: RIGHT}, {0, 1, 2}, "removed", (1,)),
    ({0: RIGHT, 1: WRONG, 2: OTHER}, {0, 1, 2, 3}, "ask", (3,)),
    ({0: RIGHT, 1: WRONG, 2: OTHER, 3: RIGHT}, {0, 1, 2, 3}, "removed", (1, 2)),
    ({0: RIGHT, 1: WRONG}, {0, 1}, "again", (0, 1)),
    ({0: RIGHT, 1: RIGHT, 2: WRONG, 3: WRONG}, {0, 1, 2, 3}, "again", (0, 1, 2, 3)),
    ({}, {0, 1}, "equal", ()),
  ],
)
def test_the_verdict(sums, alike, kind, members):
  found = Witness(sums=dict(sums)).verdict(5, alike)
  assert (found.kind, found.members) == (kind, members)
  assert found.arrays == ({} if kind == "equal" else {"w": 2})


def start(*numerics: str) -> tuple[Coordinator, list]:
  """A run whose members have these numerics, and the effects of its first epoch."""
  run = Coordinator(RunRules(len(numerics), 1, len(numerics)), clock=lambda: 0.0, failures=Failures())
  effects: list = []
  for member, text in enumerate(numerics):
    run.hello(member, 0, 1, f"address-{member}")
    effects += run.device(member, f"host {member}", text)
    effects += run.ready(member, 0, 0)
  return run, effects + run.restored(0, 0, run.epoch, 0)


def test_slices_that_are_unlike_are_refused():
  run, effects = start("v5p", "v5p", "v6e")
  (line,) = {effect.message["reason"] for effect in effects if isinstance(effect, Send) and "reason" in effect.message}
  assert (
    run.code == 2
    and "slice 2 does not compute the bits of the others: it has v6e, and they have v5p" in line
    and "witness_period=0" in line
  )
  run, _ = start("v5p", "v5p")
  run.done(0, 0, run.epoch, "step 1", 0)
  run.done(1, 0, run.epoch, "step 1", 0)
  run.hello(2, 0, 1, "address-2")
  _, refusal = run.device(2, "host 2", "v6e")  # it would join a run that trains
  assert (refusal.member, refusal.message["kind"], refusal.message["code"]) == (2, "end", 2) and run.phase == "running"


def test_a_member_with_wrong_sums_is_refused_when_it_returns_and_never_started():
  run, _ = start("chip", "chip", "chip")
  for member in range(3):
    run.witnessed(member, run.epoch, WRONG if member == 1 else RIGHT)
    run.done(member, 0, run.epoch, "step 1", 0)
  assert run.failures.excluded.keys() == {1} and run.phase == "running"
  run.lost(1, "wrong")
  assert run.failures.ended(1, -9, "host", waits=False) == (1, float("inf")) and 1 in run.failures.unreliable()
  (answer,) = run.hello(1, 0, 1, "address-1")
  assert answer.message["kind"] == "end" and "Wrong sums from slice 1 (host 1)" in answer.message["reason"]
  assert "Member 1 may not return: Witness of step 1" in run._too_few()
