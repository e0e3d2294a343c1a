"""The figure of several runs: their losses over steps, tokens and wall time, their learning rates and their speeds."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trainer.report import goodput, series
from trainer.report.history import RunHistory
from trainer.report.style import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, SKY, VERMILION, Size, short_number, time_unit

_COLORS = (BLUE, ORANGE, GREEN, PURPLE, VERMILION, SKY, INK, GREY)
_LINES = ("-", "--", ":")
_DASHES = (0, (3, 3))


def compared(
  runs: Sequence[RunHistory],
  results: Sequence[dict[str, Any]],
  names: Sequence[str],
  equal: Collection[str],
  size: Size,
) -> Figure:
  """A row for each loss, over steps, tokens and hours or minutes, and a row with learning rates and speeds. All below
  each other on a phone.

  results: of goodput.compute. equal: names of runs whose curves lie on the first one's. They are dashed, so that both
  curves are seen.
  """
  evaluated = any(len(run.evals) for run in runs)
  figure, grid = _grid(2 + evaluated, size, room=0.3 * len(runs))
  unit, name = time_unit(max(result["wall_seconds"] for result in results))
  for index, (run, result, label) in enumerate(zip(runs, results, names)):
    line = _DASHES if label in equal else _LINES[index // len(_COLORS) % len(_LINES)]
    look: dict[str, Any] = {"color": _COLORS[index % len(_COLORS)], "linestyle": line, "linewidth": 1.7}
    drawn = _Drawn(run, result, unit, label, look)
    drawn.losses(grid[0])
    if evaluated:
      drawn.evaluations(grid[1])
    drawn.rates(grid[-1])
  titles = ["Training loss", *["Evaluation loss"] * evaluated, "Learning rate"]
  for row, title in zip(grid, titles):
    for axis in row:
      axis.set_title(title)
    row[0].set_ylabel("learning rate" if title == "Learning rate" else "loss (nats per token)")
  grid[-1][2].set_title("Tokens per second")
  for column, scale in zip(grid.T, ("step", "tokens so far", f"{name} since the first start")):
    for axis in column:
      axis.set_xlabel(scale)
  _dress(grid)
  grid[0][0].set_ylim(series.limits(np.concatenate([run.rows["loss"] for run in runs]), np.empty(0)))
  handles, labels = grid[0][0].get_legend_handles_labels()
  figure.legend(handles, labels, loc="outside lower left", fontsize=9, ncols=1 if size.is_narrow else 4)
  return figure


def _grid(rows: int, size: Size, room: float) -> tuple[Figure, np.ndarray]:
  """A figure and its Axes [row, column]: those of a column have the same horizontal axis, and those of a loss the same
  vertical axis. room: inches for the legend."""
  shape = (3 * rows, 1) if size.is_narrow else (rows, 3)
  figure = Figure(figsize=(size.inches, 3.2 * shape[0] + room), layout="constrained")
  axes = figure.subplots(*shape)
  grid = axes.reshape(3, rows).T if size.is_narrow else axes
  for row in grid[:-1]:
    row[2].sharey(row[0])
  for row in grid:
    row[1].sharey(row[0])
  for column in grid.T:
    for axis in column[1:]:
      axis.sharex(column[0])
  return figure, grid


def _dress(grid: np.ndarray) -> None:
  for axis in grid.flat:
    axis.grid(axis="y")
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
  for axis in (*(axis.xaxis for axis in grid[:, 1]), grid[-1][2].yaxis):
    axis.set_major_formatter(lambda value, _: short_number(value))
  for axis in (grid[-1][0], grid[-1][2]):
    axis.set_ylim(bottom=0)
  grid[-1][2].set_xlim(left=0)


@dataclasses.dataclass(frozen=True)
class _Drawn:
  """A run, and how its curves look."""

  run: RunHistory
  result: dict[str, Any]
  unit: float
  label: str
  look: dict[str, Any]

  def losses(self, row: Sequence[Axes]) -> None:
    losses = self.run.steps["loss"]
    smoothed = series.smooth(losses)
    if smoothed is not None:
      self._curves(row, self.run.steps, losses, series.extremes, linewidth=0.8, alpha=0.3)
      losses = smoothed
    self._curves(row, self.run.steps, losses, series.thin, label=self.label, **series.dots(len(losses)))

  def evaluations(self, row: Sequence[Axes]) -> None:
    evals = self.run.evals
    if len(evals):
      look = {"label": f"{self.label}, evaluation"} | series.dots(len(evals))
      self._curves(row, evals, evals["eval_loss"], series.extremes, **look)

  def rates(self, row: Sequence[Axes]) -> None:
    """The learning rate over steps and tokens, and the speed over time."""
    steps = self.run.steps
    look = self.look | {"label": f"{self.label}, learning rate"} | series.dots(len(steps))
    for axis, field in zip(row, ("step", "tokens")):
      axis.plot(*series.extremes(steps[field], steps["lr"]), **look)
    wall, speeds = series.speed(self.run)
    row[2].plot(self._time(wall), speeds, **self.look | {"label": f"{self.label}, tokens/s"})

  def _curves(
    self, row: Iterable[Axes], rows: np.ndarray, values: np.ndarray, shorten: series.Shorten, **look: Any
  ) -> None:
    """Draws `values` of run.steps or run.evals over steps, tokens and time."""
    steps = self.run.steps
    tokens = np.interp(rows["step"], steps["step"], steps["tokens"])  # the record of an evaluation has none
    by_time = series.broken(self.run, rows, self._time(rows["wall"]), values, shorten)
    for axis, curve in zip(row, (shorten(rows["step"], values), shorten(tokens, values), by_time)):
      axis.plot(*curve, **self.look | look)

  def _time(self, wall: np.ndarray) -> np.ndarray:
    return goodput.elapsed(self.result, wall) / self.unit
