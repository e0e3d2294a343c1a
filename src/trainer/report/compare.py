"""How far the losses of two runs differ, in numbers and as a picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from trainer.config.errors import ConfigError
from trainer.observe import files
from trainer.report import history
from trainer.report.history import RunHistory


@dataclasses.dataclass(frozen=True)
class Comparison:
  """How far the losses of two runs differ, over the steps that both have."""

  largest: float  # largest of |a - b| / max(|a|, |b|); nan and inf count as equal to themselves only
  at_step: int
  common_steps: int
  equal_steps: int  # steps whose losses are equal to the last bit

  def __str__(self) -> str:
    if self.equal_steps == self.common_steps:
      return f"all {self.common_steps} losses equal to the last bit"
    return f"largest relative difference {self.largest:.1e} (step {self.at_step}) over {self.common_steps} steps"


def compare(run_directories: Sequence[str], path: str | None = None) -> Comparison:
  """Compares the loss curves of two runs; with `path`, also draws both in one picture (PNG) with their events.

  ConfigError unless there are two runs with a step in common.
  """
  if len(run_directories) != 2:
    raise ConfigError(f"two run directories can be compared, {len(run_directories)} were given")
  runs = [history.load_with_steps(directory) for directory in run_directories]
  result = of_runs(*runs)
  if result is None:
    raise ConfigError(f"{run_directories[0]} and {run_directories[1]} have no step in common")
  if path is not None:
    from trainer.report import plots, style  # matplotlib: a second to import

    directory, _, name = path.rpartition("/")
    figure = plots.styled(plots.comparison, runs, *_differences(*runs), str(result))
    files.write_bytes(directory or ".", name, style.png(figure))
  return result


def of_runs(ours: RunHistory, theirs: RunHistory) -> Comparison | None:
  """How far the losses of two runs differ; None if they have no step in common."""
  steps, difference = _differences(ours, theirs)
  if not len(steps):
    return None
  worst = int(np.argmax(difference))
  return Comparison(float(difference[worst]), int(steps[worst]), len(steps), int((difference == 0).sum()))


def _differences(ours: RunHistory, theirs: RunHistory) -> tuple[np.ndarray, np.ndarray]:
  """The steps that both runs have, and the relative difference of their losses."""
  first, second = ours.steps, theirs.steps
  steps, i, j = np.intersect1d(first["step"], second["step"], assume_unique=True, return_indices=True)
  return steps, _relative(first["loss"][i], second["loss"][j])


def _relative(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  """|a - b| / max(|a|, |b|), 0 where both are the same (nan too), infinite where only one is finite."""
  same = (a == b) | (np.isnan(a) & np.isnan(b))
  finite = np.isfinite(a) & np.isfinite(b) & ~same
  result = np.where(same, 0.0, np.inf)
  result[finite] = np.abs(a - b)[finite] / np.maximum(np.abs(a), np.abs(b))[finite]
  return result
