"""What a witness compares, and what follows from the sums."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worlds.membership.coordinator import Coordinator
from worlds.membership.dealing import deal
from worlds.membership.effects import Note, Send
from worlds.membership.failures import Failures
from worlds.membership.rules import RunRules
from worlds.membership.witness import Witness, draw, kinds

RIGHT, WRONG, OTHER = {"w": [7, 3], "b": [1, 1]}, {"w": [9, 5], "b": [1, 1]}, {"w": [8, 4], "b": [1, 1]}


@settings(deadline=None, max_examples=50)
@given(st.integers(2, 6), st.integers(1, 8), st.integers(0, 2**40), st.integers(0, 50))
def test_every_share_is_compared_once_in_as_many_checks_as_there_are_shares(members, group, seed, cycle):
  shares = members * group
  dealt = deal(shares, range(members), group)
  drawn = [draw(seed, check, dealt, {}) for check in range(cycle * shares, (cycle + 1) * shares)]
  assert sorted(one.share for one in drawn) == list(range(shares))
  assert all(one.share in dealt[one.members[0]] and len(set(one.members)) == 2 for one in drawn)


def test_only_members_of_one_kind_are_compared():
  unlike = kinds({0: "v5p", 1: "v6e", 2: "v5p", 3: "v6e", 4: "v5p", 5: "v7"})
  assert unlike == {1: 1, 3: 1, 5: 2}
  dealt = deal(12, range(6), 2)
  for check in range(60):
    members = draw(0, check, dealt, unlike).members
    assert len(members) == (1 if members[0] == 5 else 2)
    assert len({unlike.get(member, 0) for member in members}) == 1


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
    run.device(member, f"host {member}", text)
    effects += run.ready(member, 0, 0)
  return run, effects + run.restored(0, 0, run.epoch, 0)


def test_a_run_whose_slices_are_all_unlike_is_refused_and_others_are_told():
  run, effects = start("v5p", "v6e")
  (line,) = {effect.message["reason"] for effect in effects if isinstance(effect, Send) and "reason" in effect.message}
  assert run.code == 2 and "slice 0: v5p; slice 1: v6e" in line and "witness_period=0" in line
  run, effects = start("v5p", "v6e", "v5p")
  (note,) = [effect.text for effect in effects if isinstance(effect, Note)]
  assert run.phase == "running" and note.startswith("warning: the witness compares only slices of one kind")
  checks = [effect.message for effect in effects if isinstance(effect, Send) and effect.message["kind"] == "check"]
  assert len(checks) == 3 and all(check["unlike"] == {"1": 1} for check in checks)


def test_a_member_with_wrong_sums_is_refused_when_it_returns_and_never_started():
  run, _ = start("chip", "chip", "chip")
  for member in range(3):
    run.witnessed(member, run.epoch, WRONG if member == 1 else RIGHT)
    run.done(member, 0, run.epoch, "step 1", 0)
  assert run.failures.barred.keys() == {1} and run.phase == "running"
  run.lost(1, "wrong")
  assert run.failures.ended(1, -9, "host", waits=False) == (1, float("inf")) and 1 in run.failures.away()
  (answer,) = run.hello(1, 0, 1, "address-1")
  assert answer.message["kind"] == "end" and "Wrong sums from slice 1 (host 1)" in answer.message["reason"]
