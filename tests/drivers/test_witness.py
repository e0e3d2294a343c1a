"""The witness in runs of members that are threads of this process. `python -m end_to_end.flips` plays a thousand."""

from __future__ import annotations

import numpy as np
import pytest
from end_to_end import flips
from end_to_end.flips import STEPS, Flip, Runs
from tests.support.elastic_harness import TINY

from trainer.config.faults import parse


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
