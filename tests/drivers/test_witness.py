"""The witness in runs of members that are threads of this process. `python -m end_to_end.flips` plays a thousand."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest
from end_to_end import flips
from end_to_end.flips import STEPS, Flip, Runs
from tests.support.elastic_harness import TINY

from trainer.config.faults import parse
from trainer.drivers.compared_share import ComparedShare
from trainer.drivers.rounds import Contribution
from worlds.membership.messages import message
from worlds.membership.witness import draw
from worlds.peers import Peers


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
  flip = Flip(slices, 1, period, fault, found or flips.promised(fault, slices, 1, period) or (0,))
  played = runs.play(slices, 1, period, fault)
  assert flips.broken(flip, played, runs.right(slices, 1)) == [], (flip, played.log, played.alarms())


def test_a_witness_changes_nothing_and_says_nothing(runs):
  plain, witnessed = runs.play(3, 1, STEPS + 1), runs.play(3, 1, 1)
  assert all(np.array_equal(found, plain.states()[0]) for found in [*plain.states(), *witnessed.states()])
  assert len(plain.states()) == len(witnessed.states()) == 3 and not witnessed.alarms() and not witnessed.log


def test_what_the_supervisor_says_of_one_round_does_not_hold_for_the_next_round():
  """Members 0 and 2 were asked in step 6, which was committed in the same epoch. In step 7 all do as drawn again."""
  membership: Any = types.SimpleNamespace(member=3)
  exchange: Any = None
  peers = Peers(membership, exchange, lane=0)
  peers.epoch, peers.dealt = 8, {0: (0, 1), 2: (2, 3), 3: (4, 5)}
  checks: Any = types.SimpleNamespace(of_share=lambda scalars, parts: (scalars, parts))
  of_step = lambda check: ComparedShare(peers, checks, 0, check, lambda share: Contribution(np.zeros(3)))
  drawn = [draw(0, check, peers.dealt) for check in range(6)]
  second = next(check for check, one in enumerate(drawn) if one.members[1] == 3)
  peers.handle(message("check", epoch=8, asked=[0, 2], since=8))
  during = of_step(second)
  assert during.begins_again() and not during.begins_again()
  during.join_in()
  assert during.record() == {"share": drawn[second].share, "members": [0, 2]}
  peers.handle(message("commit", epoch=8, round="step 6", stop=False, leave=[], changes=False, seconds={}))
  for check, one in enumerate(drawn):
    after = of_step(check)
    assert not after.begins_again()
    after.join_in()
    assert after.record() == {"share": one.share, "members": sorted(one.members)}
