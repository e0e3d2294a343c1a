from __future__ import annotations

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


def test_a_smoothed_curve_does_not_end_at_a_single_step():
  losses = 3.0 + np.random.default_rng(0).normal(scale=0.1, size=(100, 1000))
  assert np.std([series.smooth(of_run)[-1] for of_run in losses]) < 0.03
