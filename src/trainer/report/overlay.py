"""The figure of several runs: their losses over steps and over wall time."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trainer.report import goodput, series
from trainer.report.history import Run
from trainer.report.style import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, SKY, VERMILION, Size, time_unit

_COLORS = (BLUE, ORANGE, GREEN, PURPLE, VERMILION, SKY, INK, GREY)
_LINES = ("-", "--", ":")
_DASHES = (0, (3, 3))


def compared(
  runs: Sequence[Run], results: Sequence[dict[str, Any]], names: Sequence[str], equal: Collection[str], size: Size
) -> Figure:
  """Losses over steps on the left and over hours or minutes on the right; below each other on a phone.

  results: of goodput.compute. equal: names of runs whose curves lie on the first one's. They are dashed, so that both
  curves are seen.
  """
  rows = 1 + any(len(run.evals) for run in runs)
  shape = (2 * rows, 1) if size.is_narrow else (rows, 2)
  figure = Figure(figsize=(size.inches, 3.4 * shape[0] + 0.3 * len(runs)), layout="constrained")
  axes = figure.subplots(*shape, sharex=False if size.is_narrow else "col", sharey=not size.is_narrow and "row")
  training, *evaluation = axes.reshape(2, rows).T if size.is_narrow else axes.reshape(rows, 2)
  unit, name = time_unit(max(result["wall_seconds"] for result in results))
  for index, (run, result, label) in enumerate(zip(runs, results, names)):
    line = _DASHES if label in equal else _LINES[index // len(_COLORS) % len(_LINES)]
    look: dict[str, Any] = {"color": _COLORS[index % len(_COLORS)], "linestyle": line}
    losses, times = run.steps["loss"], goodput.elapsed(result, run.steps["wall"]) / unit
    smoothed = series.smooth(losses)
    if smoothed is not None:
      _draw(training, run, run.steps, times, losses, linewidth=0.8, alpha=0.3, **look)
      losses = smoothed
    _draw(training, run, run.steps, times, losses, linewidth=1.7, label=label, **look, **series.dots(len(losses)))
    if len(run.evals):
      look |= {"linewidth": 1.7, "label": f"{label}, evaluation"} | series.dots(len(run.evals))
      times = goodput.elapsed(result, run.evals["wall"]) / unit
      _draw(evaluation[0], run, run.evals, times, run.evals["eval_loss"], **look)
  for title, pair in zip(("Training loss", "Evaluation loss"), (training, *evaluation)):
    _dress(pair[0], "step", title)
    _dress(pair[1], f"{name} since the first start", f"{title} over wall time")
    pair[0].set_ylabel("loss (nats per token)")
    pair[1].set_xlim(left=0)
  handles, labels = training[0].get_legend_handles_labels()
  figure.legend(handles, labels, loc="outside lower left", fontsize=9, ncols=1 if size.is_narrow else 4)
  return figure


def _draw(pair: Sequence[Axes], run: Run, rows: np.ndarray, times: np.ndarray, values: np.ndarray, **look: Any) -> None:
  pair[0].plot(*series.thin(rows["step"], values), **look)
  pair[1].plot(*series.broken(run, rows, times, values), **look)


def _dress(axis: Axes, label: str, title: str) -> None:
  axis.set_title(title)
  axis.set_xlabel(label)
  axis.grid(axis="y")
  axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
