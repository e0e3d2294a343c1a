"""The table of what the loop does after a step, and the rules that hold for every combination."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from trainer.run.after_step import Actions, Due, decide

CASES = [
  # what is due, actions with snapshots, actions without
  (Due(), Actions(), Actions()),
  (Due(snapshot=True), Actions("early"), Actions()),
  (Due(checkpoint=True), Actions("early", True, save="due"), Actions(record=True, save="due")),
  (Due(evaluation=True), Actions(record=True, evaluate=True), Actions(record=True, evaluate=True)),
  (
    Due(evaluation=True, checkpoint=True),
    Actions("early", True, evaluate=True, save="due"),
    Actions(record=True, evaluate=True, save="due"),
  ),
  (Due(evaluation=True, snapshot=True), Actions("early", True, evaluate=True), Actions(record=True, evaluate=True)),
  (Due(resize=True), Actions("late", True, end="slice_up"), Actions(record=True, save="final", end="slice_up")),
  (
    Due(resize=True, evaluation=True),
    Actions("late", True, evaluate=True, end="slice_up"),
    Actions(record=True, evaluate=True, save="final", end="slice_up"),
  ),
  (Due(stop=True), Actions(record=True, save="final", end="preempted"), ...),
  (Due(stop=True, snapshot=True), Actions("early", True, save="final", end="preempted"), ...),
  (Due(stop=True, evaluation=True), Actions(record=True, save="final", end="preempted"), ...),
  (Due(stop=True, resize=True), Actions("late", True, save="final", end="preempted"), ...),
  (Due(last=True), Actions(record=True, save="final", end="complete"), ...),
  (
    Due(last=True, evaluation=True),
    Actions(record=True, evaluate=True, save="final", end="complete"),
    Actions(record=True, evaluate=True, save="final", end="complete"),
  ),
  (
    Due(last=True, stop=True, evaluation=True),
    Actions(record=True, evaluate=True, save="final", end="complete"),
    Actions(record=True, evaluate=True, save="final", end="complete"),
  ),
]
EVERYTHING = [Due(*values) for values in itertools.product((False, True), repeat=len(dataclasses.fields(Due)))]


@pytest.mark.parametrize(("due", "with_snapshots", "without"), CASES)
def test_table(due, with_snapshots, without):
  assert decide(due, uses_snapshots=True) == with_snapshots
  if without is ...:  # equal except for the snapshot
    without = dataclasses.replace(with_snapshots, snapshot="none")
  assert decide(due, uses_snapshots=False) == without


@pytest.mark.parametrize("uses_snapshots", [False, True])
def test_rules_for_every_combination(uses_snapshots):
  for due in EVERYTHING:
    actions = decide(due, uses_snapshots=uses_snapshots)
    ends = due.last or due.stop or due.resize
    assert bool(actions.end) == ends, due
    # Nothing is evaluated, saved or ended before the step is known to be good.
    assert actions.record or not (actions.evaluate or actions.save != "none" or actions.end), due
    # A process that ends leaves a committed checkpoint; a resize leaves a snapshot or a checkpoint.
    assert (actions.save == "final") == (due.last or due.stop or (due.resize and not uses_snapshots)), due
    if actions.end == "slice_up":
      assert (actions.snapshot == "late") == uses_snapshots, due
    # What is due is done, unless the process must stop now.
    assert actions.evaluate == (due.evaluation and (due.last or not due.stop)), due
    if due.checkpoint:
      assert actions.save != "none", due
    if (due.last and not due.evaluation) or not uses_snapshots:
      assert actions.snapshot == "none", due
    elif due.snapshot or due.checkpoint:
      assert actions.snapshot != "none", due
    # A slice that is lost in an evaluation costs no step, unless the attempt would end anyway.
    if actions.evaluate and actions.snapshot != "none":
      assert (actions.snapshot == "early") == (actions.end != "slice_up"), due
