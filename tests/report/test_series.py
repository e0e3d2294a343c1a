from __future__ import annotations

import math

import numpy as np
from tests.support import fake_run

from trainer.report import history, series


def test_a_long_curve_becomes_means_of_equal_groups():
  xs = np.arange(10 * series.MAX_POINTS, dtype=float)
  ys = np.where(xs == 7, np.nan, 2 * xs)
  thin_xs, thin_ys = series.thin(xs, ys)
  assert len(thin_xs) == len(thin_ys) == series.MAX_POINTS
  assert thin_xs[0] == 4.5 and thin_ys[1] == 2 * thin_xs[1]
  assert thin_ys[0] == 2 * np.delete(np.arange(10), 7).mean()  # the nan is left out, not its whole group
  assert series.thin(xs[:5], ys[:5])[0] is not None and len(series.thin(xs[:5], ys[:5])[0]) == 5


def test_many_marks_are_reduced_and_the_ends_are_kept():
  places = np.sort(np.random.default_rng(0).uniform(0, 1e6, 200_000))
  kept = series.spread(places)
  assert len(kept) <= series.MAX_POINTS + 1 and kept[0] == places[0] and kept[-1] > 0.999e6
  assert len(series.spread(np.full(100_000, 3.0))) == 1


def test_smoothing_reaches_as_far_as_the_run_is_long():
  noise = np.random.default_rng(0).normal(size=200_000)
  spreads = [series.smooth(noise[:count]).std() for count in (60, 200, 20_000, 200_000)]
  assert spreads == sorted(spreads, reverse=True)
  assert spreads[1] < 0.5 and spreads[3] < 0.03
  assert series.smooth(noise[:20]) is None


def test_a_smoothed_curve_does_not_end_at_a_single_step():
  losses = 3.0 + np.random.default_rng(0).normal(scale=0.1, size=(100, 1000))
  ends = np.array([series.smooth(of_run)[-1] for of_run in losses])
  assert ends.std() < 0.03 and series.smooth(losses[0])[0] == losses[0][0]


def test_smoothing_does_not_shift_a_curve():
  line = np.linspace(8.0, 2.0, 500)
  np.testing.assert_allclose(series.smooth(line)[:480], line[:480])
  np.testing.assert_allclose(series.smooth(line), line, atol=0.12)  # at the end, the mean of the last steps
  line[100], line[0] = math.inf, math.nan
  smoothed = series.smooth(line)
  assert np.isfinite(smoothed[1:]).all() and abs(smoothed[100] - 6.8) < 0.05


def test_slices_fall_when_one_is_lost_and_rise_when_it_returns(tmp_path):
  """The curve fell in the middle of the outage, halfway between two steps."""
  run = fake_run.FakeRun(tmp_path / "a", steps=20)
  for step in range(1, 11):
    run.step(step)
  loss = run.wall + run.now
  run.lose(1, 10, resume=11, outage=100.0)
  run.step(11)
  run.gain(1, 11)
  returned = run.wall + run.now - 0.1  # the restore of the larger view follows the event
  run.step(12)
  run.close()
  ((times, alive),) = series.slices_alive(history.load(str(tmp_path / "a")))
  assert alive.tolist() == [3, 3, 2, 2, 3, 3]
  np.testing.assert_allclose(times[[2, 4]], [loss, returned], atol=1e-3)


def test_an_outage_without_a_step_is_shown(tmp_path):
  """A fixed mesh waits for the replacement: no step is ever done with fewer slices."""
  run = fake_run.FakeRun(tmp_path / "a", steps=20)
  run.step(1)
  run.lose(1, 1, resume=2, outage=30.0)
  run.alive.add(1)
  run.step(2)
  run.close()
  run = history.load(str(tmp_path / "a"))
  ((_, alive),) = series.slices_alive(run)
  assert alive.tolist() == [3, 2, 3, 3]
  assert series.slices_per_step(run)[1].tolist() == [3, 3]


def test_speed_is_level_during_a_step_and_has_gaps_where_there_was_none(tmp_path):
  run = fake_run.FakeRun(tmp_path / "a", slices=1)
  run.step(1)
  run.step(2)
  run.now += 60
  run.step(3)
  run.close()
  times, rates = series.speed(history.load(str(tmp_path / "a")))
  rate = 6144 / 0.35
  np.testing.assert_allclose(rates, [rate, rate, rate, rate, rate, math.nan, rate, rate])
  assert np.isnan(times[5]) and abs(times[6] - times[4] - 60) < 1e-3


def test_curves_of_a_long_run_have_few_points(tmp_path):
  run = fake_run.FakeRun(tmp_path / "a", slices=1)
  for step in range(1, 5001):
    run.step(step)
  run.close()
  loaded = history.load(str(tmp_path / "a"))
  assert len(series.speed(loaded)[0]) <= 3 * series.MAX_POINTS
  assert len(series.slices_per_step(loaded)[0]) == 2


def gaps(run, rows) -> list[float]:
  """The last x before each gap of the curve of `rows`."""
  xs, ys = series.broken(run, rows, rows["step"], rows["step"])
  assert np.array_equal(np.isnan(xs), np.isnan(ys)) and set(xs[np.isfinite(xs)]) == set(rows["step"])
  return xs[np.flatnonzero(np.isnan(xs)) - 1].tolist()


def test_a_curve_breaks_where_the_run_stood_still(tmp_path):
  """The loss ran flat through an outage of 40 s in one process, and so did the evaluations."""
  run = fake_run.FakeRun(tmp_path / "a", steps=100)
  for step in range(1, 101):
    run.step(step)
    if step == 30:
      run.lose(1, 30, resume=31, outage=40.0)
    if step == 50:  # an evaluation is no outage
      run.after(40.0, "eval", step=50, seconds=40.0)
    if step == 70:
      run.close()
      now = run.wall + run.now
      run = fake_run.FakeRun(tmp_path / "a", steps=100, wall=now)
  run.end(step=100)
  loaded = history.load(str(tmp_path / "a"))
  assert gaps(loaded, loaded.steps) == [30, 70]
  assert gaps(loaded, loaded.evals) == [20, 60]


def test_a_steady_run_has_one_curve(tmp_path):
  fake_run.plain_run(tmp_path / "a")
  loaded = history.load(str(tmp_path / "a"))
  assert gaps(loaded, loaded.steps) == [] and gaps(loaded, loaded.evals) == []
