"""The judgement of histories: a sabotaged run is caught, and a good one is not."""

from __future__ import annotations

import dataclasses

import pytest
from end_to_end.histories import __main__ as histories
from end_to_end.histories import oracle

STEPS = 3


def line(step: int, **changes) -> oracle.Record:
  return {"step": step, "loss": 4.0 - step / 8, "grad_norm": 0.5, "tokens": 64 * step, "seconds": step / 7, **changes}


LINES = [line(1), {"step": 1, "eval_loss": 3.5}, line(2), line(3)]
RECEIPT = [{"step": n, "examples": f"digest {n}", "computed": {"0": [[0, 2]], "1": [[2, 4]]}} for n in (1, 2, 3)]
GOOD = oracle.Left(LINES, [{"after": 0}, *RECEIPT], [], {"embedding": "a", "opt_state.0.mu": "b"}, {"metrics.jsonl"})


def changed(**fields) -> oracle.Left:
  return dataclasses.replace(GOOD, **fields)


def test_a_good_run_breaks_nothing():
  other = [{**one, "seconds": 9.0, "slices": 2} for one in LINES]
  assert oracle.broken(changed(lines=other), GOOD, oracle.Promise(STEPS)) == []
  again = [*LINES[:3], *LINES[2:]]
  assert oracle.broken(changed(lines=again), GOOD, oracle.Promise(STEPS, repeats=True)) == []
  near = [{**one, "loss": one["loss"] * (1 + 1e-6)} if "loss" in one else one for one in LINES]
  assert oracle.broken(changed(lines=near, state=dict.fromkeys(GOOD.state, "c")), GOOD, oracle.Promise(3, 1e-5)) == []


@pytest.mark.parametrize(
  ("sabotage", "says"),
  [
    ({"lines": [*LINES[:2], line(2, loss=3.7500001), line(3)]}, "step 2 has other values: {'loss'"),
    ({"lines": [*LINES[:2], line(2, tokens=127), line(3)]}, "step 2 has other values: {'tokens'"),
    ({"lines": [LINES[0], {"step": 1, "eval_loss": 3.6}, *LINES[2:]]}, "evaluation of step 1 has other values"),
    ({"lines": [*LINES[:2], line(3)]}, "step 2 is not recorded"),
    ({"lines": [*LINES, line(4)]}, "step 4 is recorded, and not in"),
    ({"lines": [*LINES[:3], *LINES[2:]]}, "step 2 is recorded 2 times"),
    ({"lines": [LINES[0], LINES[1], line(3), line(2)]}, "not in the order"),
    ({"receipt": [RECEIPT[0], {**RECEIPT[1], "examples": "digest 1"}, RECEIPT[2]]}, "step 2 used other examples"),
    ({"receipt": [RECEIPT[0], RECEIPT[2]]}, "the receipt has not each step once"),
    ({"receipt": [{**RECEIPT[0], "computed": {"0": [[0, 2]], "1": [[1, 4]]}}, *RECEIPT[1:]]}, "a part twice"),
    ({"receipt": [{**RECEIPT[0], "computed": {"0": [[0, 2]], "1": [[3, 4]]}}, *RECEIPT[1:]]}, "or not at all"),
    ({"state": {**GOOD.state, "opt_state.0.mu": "c"}}, "opt_state.0.mu differs in the final state"),
    ({"state": {}}, "the final state has other arrays"),
    ({"files": {"metrics.jsonl", "metrics.jsonl.tmp"}}, "these files are left"),
    ({"codes": [0, 1]}, "exit code 1"),
    ({"printed": "Exception in thread saver:"}, "was printed"),
    (
      {"events": [{"kind": "recovery", "steps_lost": 1, "event": "slice_down", "slice": [0]}]},
      "1 completed steps lost",
    ),
  ],
)
def test_a_sabotaged_run_is_caught(sabotage, says):
  broken = oracle.broken(changed(**sabotage), GOOD, oracle.Promise(STEPS))
  assert any(says in one for one in broken), broken


def test_a_step_that_was_repeated_with_another_value_is_caught():
  lines = [*LINES[:3], line(2, grad_norm=0.6), line(3)]
  (wrong,) = oracle.broken(changed(lines=lines), GOOD, oracle.Promise(STEPS, repeats=True))
  assert "step 2 has other values: {'grad_norm': (0.6, 0.5)}" in wrong


def test_a_history_that_breaks_a_rule_ends_with_1_and_its_command(monkeypatch, tmp_path, capsys):
  class Sabotaged:
    def opened(self, folder, kind, seeds, keys):
      import contextlib

      play = lambda seed: histories.Played(
        "kill@2", ["step 2 is not recorded"] * (seed == 4), histories.Counter(kill=1)
      )
      return contextlib.nullcontext(play)

  monkeypatch.setattr(histories.importlib, "import_module", lambda name: Sabotaged())
  assert histories.run("elastic", tmp_path, range(2, 4)) == 0
  assert histories.run("elastic", tmp_path, range(2, 6), ["a=1"]) == 1
  assert "repeat with: python -m end_to_end.histories elastic --first 4 --count 1 a=1" in capsys.readouterr().out
