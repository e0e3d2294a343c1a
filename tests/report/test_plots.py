"""The reference lines of the loss picture."""

from __future__ import annotations

import types

import pytest
from tests.support import fake_run

from trainer.report import goodput, history, plots, sections


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


def figures(folder, steps: int, **start):
  fake_run.plain_run(folder, steps=steps, **start)
  run = history.load(str(folder))
  return [
    plots.styled(plots.loss_over_steps, run),
    plots.styled(plots.over_time, run, goodput.compute(run)),
    plots.styled(plots.details, run),
  ]


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_short_runs_have_markers_and_ticks_that_differ(tmp_path, steps):
  """A run of one step had the ticks 1 1 1 1 1, and a curve without a line."""
  for figure in figures(tmp_path / "a", steps):
    figure.draw_without_rendering()
    for axis in figure.axes:
      for line in axis.get_lines():
        named = not line.get_label().startswith("_") and line.get_drawstyle() == "default"
        assert line.get_marker() == "o" or not named or line.get_label() == "tokens/s"
      for ticks in (axis.get_xticklabels(), axis.get_yticklabels()):
        texts = [tick.get_text() for tick in ticks if tick.get_text()]
        assert len(set(texts)) == len(texts)
  numbers = [tick.get_text().split("\n")[0] for tick in figures(tmp_path / "b", steps)[0].axes[-1].get_xticklabels()]
  assert {str(step) for step in range(1, steps + 1)} <= set(numbers)


def test_a_run_with_experts_shows_their_loads(tmp_path):
  fake = fake_run.FakeRun(tmp_path / "a", steps=3)
  for step, most in enumerate((2.5, 2.0, 1.5), start=1):
    fake.step(step, router_load_max=most, router_load_min=0.25, router_entropy=0.9)
  fake.close()
  run = history.load(str(tmp_path / "a"))
  *_, axis = plots.styled(plots.details, run).axes
  curves = {line.get_label(): line.get_ydata().tolist() for line in axis.get_lines()[:2]}
  assert curves == {"most used": [2.5, 2.0, 1.5], "least used": [0.25, 0.25, 0.25]}
  caption = sections.captions(run, goodput.compute(run))[2]
  assert "1.5 for the most used, 0.25 for the least used, at the end; no token is dropped." in caption
