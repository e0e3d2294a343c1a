"""The witness in runs of members that are threads of this process. `end_to_end.histories flips` has real processes."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import numpy as np
import pytest
from tests.drivers.member_threads import STEPS, Played, Runs
from tests.support.elastic_harness import TINY

from trainer.config.faults import Fault, parse
from trainer.drivers.compared_share import ComparedShare
from trainer.drivers.rounds import Contribution
from worlds.membership.dealing import deal
from worlds.membership.messages import message, to_ranges
from worlds.membership.witness import draw
from worlds.peers import Peers


@dataclasses.dataclass(frozen=True)
class Flip:
  """One run. found: the steps in one of which the flip must be found; 0: it need not be found."""

  slices: int
  group: int
  period: int
  fault: Fault
  found: tuple[int, ...]


def promised(fault: Fault, slices: int, group: int, period: int) -> tuple[int, ...]:
  """The steps in one of which the fault must be found. 0 among them: rounding may hide it. None: it is out of reach."""
  step = fault.step
  if fault.kind == "flip_weight" or (fault.kind == "flip_optimizer" and step % period == 0):
    return (step,)
  if fault.kind == "flip_optimizer":  # by the weights that follow from it, at the latest by the next witness
    witness = step + -step % period
    return (*range(step + 1, witness + 1), 0)
  dealt = deal(slices * group, range(slices), group)
  compared = (n for n in range(step, STEPS + 1 if fault.sticky else step + 1) if n % period == 0)
  return next(((n,) for n in compared if fault.slice in draw(0, n // period, dealt).members), ())


def broken(flip: Flip, played: Played, right: np.ndarray) -> list[str]:
  """The rules that a run of members breaks."""
  fault, alarms, states = flip.fault, played.alarms(), played.states()
  others = [run for run in played.members if run.place.member != fault.slice]
  lost = {member: step + 1 for run in others for member, step in run.lost_at.items()}
  gradient, within, undecided = fault.kind == "flip_gradient", any(flip.found), flip.slices == 2 and fault.sticky
  removes = within and not (gradient and flip.slices == 2)
  expected = [{fault.slice: n} if n and removes else {} for n in flip.found]
  clean = within and (not gradient or flip.found == (fault.step,))
  # A second flip of the same bit may undo the first one where the state is compared, and a third one comes after that.
  undone = fault.kind == "flip_optimizer" and fault.sticky and not lost
  rules = {
    "lost": lost in expected,
    "code": played.code == int(gradient and within and undecided),
    "alarms": len(alarms) == int(gradient and within),
    # Wrong sums that were committed before they were found stay in the state, which is equal on all members.
    "states": undone or all((found == (right if clean else states[0])).all() for found in states),
    "survivors": len(states) == (0 if played.code else flip.slices - len(lost)),
  }
  for alarm in alarms:
    outcome = "removed" if flip.slices > 2 else "undecided" if fault.sticky else "transient"
    named = [0, 1] if outcome == "undecided" else [fault.slice]
    rules |= {
      "outcome": (alarm["outcome"], alarm["members"]) == (outcome, named),
      "step": alarm["round"] == f"step {flip.found[0]}",
      "array": list(alarm["arrays"].values()) == [1] and fault.array in next(iter(alarm["arrays"])),
      "barred": set(played.excluded) == ({fault.slice} if outcome == "removed" else set()),
    }
  return [name for name, holds in rules.items() if not holds]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
  return Runs(tmp_path_factory.mktemp("flips"), TINY.split())


@pytest.mark.parametrize(
  "slices, period, fault, found",
  [
    (3, 1, "flip_gradient@4:1:sticky", None),
    (3, 2, "flip_gradient@2:0=layers.feed_forward.down#31", None),  # the primary
    (3, 1, "flip_weight@5:0", (5,)),
    (3, 3, "flip_optimizer@6:2", (6,)),
    (2, 1, "flip_gradient@3:1", None),
    (2, 1, "flip_gradient@3:1:sticky", None),
    (3, 2, "flip_gradient@3:1", None),  # out of reach
  ],
)
def test_a_flip_is_found_in_the_promised_step(runs, slices, period, fault, found):
  (fault,) = parse(fault)
  flip = Flip(slices, 1, period, fault, found or promised(fault, slices, 1, period) or (0,))
  played = runs.play(slices, 1, period, fault)
  assert broken(flip, played, runs.right(slices, 1)) == [], (flip, played.log, played.alarms())


def test_a_witness_changes_nothing_and_says_nothing(runs):
  plain, witnessed = runs.play(3, 1, STEPS + 1), runs.play(3, 1, 1)
  assert all(np.array_equal(found, plain.states()[0]) for found in [*plain.states(), *witnessed.states()])
  assert len(plain.states()) == len(witnessed.states()) == 3 and not witnessed.alarms() and not witnessed.log


def test_what_the_supervisor_says_of_one_round_does_not_hold_for_the_next_round():
  """Members 0 and 2 were asked in step 6, which was committed in the same epoch. In step 7 all do as drawn again."""
  membership: Any = types.SimpleNamespace(member=3)
  exchange: Any = None
  peers = Peers(membership, exchange, lane=0)
  dealt = {0: (0, 1), 2: (2, 3), 3: (4, 5)}
  checks: Any = types.SimpleNamespace(of_share=lambda scalars, parts: (scalars, parts))
  of_step = lambda check: ComparedShare(peers, checks, 0, check, lambda share: Contribution(np.zeros(3)))
  drawn = [draw(0, check, dealt) for check in range(6)]
  second = next(check for check, one in enumerate(drawn) if one.members[1] == 3)
  peers.handle(message("check", epoch=8, asked=[0, 2], since=8))
  assert peers.check == {}, "the epoch has not begun"
  members, ranges = {str(i): ["address"] for i in dealt}, {str(i): to_ranges(shares) for i, shares in dealt.items()}
  others = {"base": 0, "gone": [], "lost": {}, "fresh": [], "source": 0, "primary": 0, "attempt": 1, "slow_steps": {}}
  peers.handle(message("world", epoch=8, members=members, ranges=ranges, **others))
  assert peers.dealt == dealt
  during = of_step(second)
  assert during.must_recompute() and not during.must_recompute()
  during.compute_if_drawn()
  assert during.record() == {"share": drawn[second].share, "members": [0, 2]}
  peers.handle(message("commit", epoch=8, round="step 6", stop=False, leave=[], changes=False, seconds={}))
  for check, one in enumerate(drawn):
    after = of_step(check)
    assert not after.must_recompute()
    after.compute_if_drawn()
    assert after.record() == {"share": one.share, "members": sorted(one.members)}
