"""The reference lines of the loss picture."""

from __future__ import annotations

import json
import math
import types

import numpy as np
import pytest
from tests.support import fake_run

from trainer.observe import metrics
from trainer.report import goodput, history, plots, sections, series, style


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


def long_run(path, steps: int = 20_000, spike: int = 12_345, **spikes) -> history.RunHistory:
  """A run of one process whose step `spike` has other values."""
  path.mkdir()
  rows = []
  for step in range(1, steps + 1):
    row = {"step": step, "seconds": 0.5, "loss": 3 - step / steps, "grad_norm": 1.0, "lr": 1e-3, "slices": 1}
    row |= {"tokens": 10 * step, "router_load_max": 2.0, "router_load_min": 0.5}
    row |= {"process": "p", "attempt": 1, "wall": 1e9 + step / 2, "monotonic": step / 2}
    rows.append(row | (spikes if step == spike else {}))
  (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  return history.load(str(path))


def curves(figure) -> dict[str, tuple[np.ndarray, float]]:
  """Curve: its heights, and the top of its picture."""
  lines = [(axis, line) for axis in figure.axes for line in axis.get_lines()]
  return {line.get_label(): (line.get_ydata(), axis.get_ylim()[1]) for axis, line in lines}


def test_one_step_of_a_long_run_is_seen_in_every_picture(tmp_path):
  """Curves were means of groups: a spike of 3 nats among 100,000 steps was a bump of 0.04."""
  run = long_run(tmp_path / "a", loss=5.5, grad_norm=70.0, seconds=50.0, router_load_max=9.0, router_load_min=0.0)
  result = goodput.compute(run)
  found = curves(plots.styled(plots.loss_over_steps, run)) | curves(plots.styled(plots.details, run))
  over_time = curves(plots.styled(plots.over_time, run, result))
  for values, top in (found["training"], over_time["training"]):
    assert np.nanmax(values) == 5.5 < top and len(values) <= series.MAX_POINTS + 10
  for name, high in (("gradient norm", 70.0), ("most used", 9.0)):
    values, top = found[f"{name}, extremes"]
    assert values.max() == high < top and values.min() < high and found[name][0].max() < high
  assert found["least used, extremes"][0].min() == 0.0
  run.start["tokens_per_step"] = 10
  slow = curves(plots.styled(plots.over_time, run, result))["tokens/s of a step"][0]
  assert np.nanmin(slow) == pytest.approx(0.2) and np.nanmax(slow) == pytest.approx(20)


def test_extremes_are_steps_of_the_run_in_order():
  xs, ys = np.arange(40_000.0), np.random.default_rng(0).normal(size=40_000)
  ys[100:300], ys[7] = np.nan, np.inf
  thin_xs, thin_ys = series.extremes(xs, ys)
  assert len(thin_xs) <= series.MAX_POINTS and (np.diff(thin_xs) > 0).all()
  known = np.isfinite(thin_ys)
  assert np.array_equal(thin_ys[known], ys[thin_xs[known].astype(int)]) and not known.all()
  finite = ys[np.isfinite(ys)]
  assert thin_ys[known].max() == finite.max() and thin_ys[known].min() == finite.min()
  assert all(np.isfinite(series.extremes(xs[:9], ys[:9])[1]) == np.isfinite(ys[:9]))


def test_a_picture_has_room_for_every_loss_except_a_rare_one_that_is_far_away():
  usual = np.linspace(2.0, 10.0, 5000)
  assert series.limits(np.append(usual, 13.0), np.empty(0))[1] > 13.0  # a spike of 3 nats
  assert series.limits(np.append(np.full(5000, 2.0), 5.0), np.empty(0))[1] > 5.0
  far = series.limits(np.append(usual, 1e6), np.array([1.5, math.nan]))
  assert far[0] < 1.5 and 10 < far[1] < 40
  assert series.limits(np.full(5000, 2.0), np.array([11.0]))[1] > 11.0  # a line to compare with never leaves
  assert series.limits(np.array([math.nan]), np.empty(0)) is None
  for few in ([2.0, 8.0], [3.0]):
    low, high = series.limits(np.array(few), np.empty(0))
    assert low < min(few) and high > max(few)


def test_steps_that_were_done_again_are_inside_the_picture(tmp_path):
  """Their crosses were cut where they were better than every step that counts."""
  run = fake_run.FakeRun(tmp_path / "a", steps=40, slices=1)
  for step in range(1, 31):
    run.step(step, error=-0.5 if step > 25 else 0.0)
  run.step(20)
  run.metrics.write_eval(metrics.Evaluation(20, 0.25))  # lower than any training loss
  run.close()
  run = history.load(str(tmp_path / "a"))
  axis = plots.styled(plots.loss_over_steps, run).axes[1]
  assert axis.get_ylim()[0] < 0.25 < run.lost["loss"].min() < run.steps["loss"].min()


@pytest.mark.parametrize("size", style.PAGE)
def test_no_legend_lies_on_a_curve(tmp_path, size):
  """The legend of the experts did."""
  run = long_run(tmp_path / "a", steps=200)
  run.rows["slices"][::2] = 2
  run.rows["router_load_max"][::3], run.rows["router_load_min"][::3] = 4.0, 0.1  # curves over the whole picture
  run.rows["router_load_max"][1::3] = 0.6
  figure = plots.styled(plots.details, run, size)
  figure.draw_without_rendering()
  legends = [(axis, axis.get_legend().get_window_extent()) for axis in figure.axes if axis.get_legend()]
  assert len(legends) == 2
  for axis, box in legends:
    assert box.y1 <= axis.get_window_extent().y1 + 1
    for line in axis.get_lines()[:2]:
      assert not box.padded(2).count_contains(axis.transData.transform(line.get_xydata()))
    assert not any(box.overlaps(patch.get_window_extent()) for patch in axis.patches)


@pytest.mark.parametrize(("start", "empty"), [(300.0, False), (2.0, True)])
def test_a_slow_start_leaves_no_empty_picture(tmp_path, start, empty):
  """70 % of the picture were blank."""
  run = fake_run.FakeRun(tmp_path / "a", steps=60)
  run.now += start
  for step in range(1, 61):
    run.step(step)
  run.end(step=60)
  history_ = history.load(str(tmp_path / "a"))
  left, right = plots.styled(plots.over_time, history_, goodput.compute(history_)).axes[1].get_xlim()
  first = (run.now - 100 - 60 * 0.35 - 0.5) / (60 if right < 100 else 1)
  assert (left == 0) == empty and left <= first
  assert (first - left) / (right - left) < 0.3
