"""The reference lines of the loss picture."""

from __future__ import annotations

import types

import pytest
from tests.support import fake_run

from trainer.report import goodput, history, plots


def lines(evals=({"step": 1},), **start) -> dict[str, tuple[float, bool]]:
  run = types.SimpleNamespace(start=start, evals=list(evals))
  return {line.name: (line.value, line.above) for line in plots._references(run)}


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
