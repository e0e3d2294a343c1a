"""The reference lines of the loss picture."""

from __future__ import annotations

import types

import pytest

from trainer.report import plots


def lines(evals=({"step": 1},), **start) -> dict[str, tuple[float, bool]]:
  run = types.SimpleNamespace(start=start, evals=list(evals))
  return {line.name: (line.value, line.above) for line in plots._references(run)}


def test_each_curve_has_its_own_unigram_line():
  """The only line was the training text's, and stood next to the evaluation curve too."""
  found = lines(unigram_entropy=6.26, unigram_eval_loss=6.9)
  assert found == {"unigram model, training": (6.26, False), "unigram model, evaluation": (6.9, True)}
  assert lines(unigram_entropy=6.9, unigram_eval_loss=6.26)["unigram model, evaluation"] == (6.26, False)


def test_a_line_without_its_curve_or_value_is_not_drawn():
  assert list(lines(evals=(), unigram_entropy=6.0, unigram_eval_loss=6.1)) == ["unigram model, training"]
  assert lines(unigram_entropy=None, unigram_eval_loss=None) == {}
  assert lines(vocab_size=1)["uniform: ln V"][0] == pytest.approx(0)
