"""The figure of several runs: their losses over steps and over wall time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trainer.report import goodput, series
from trainer.report.history import Run
from trainer.report.style import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, SKY, VERMILION, Size, time_unit

_COLORS = (BLUE, ORANGE, GREEN, PURPLE, VERMILION, SKY, INK, GREY)
_LINES = ("-", "--", ":")


def losses(runs: Sequence[Run], results: Sequence[dict[str, Any]], names: Sequence[str], size: Size) -> Figure:
  """Losses over steps on the left and over hours or minutes on the right; below each other on a phone.

  results: of goodput.compute. The first run is drawn below the others as a wide line, so that a run with its losses
  does not hide it.
  """
  shape = (2, 1) if size.is_narrow else (1, 2)
  figure = Figure(figsize=(size.inches, 3.4 * shape[0] + 0.3 * len(runs)), layout="constrained")
  by_step, by_time = figure.subplots(*shape, sharey=True)
  unit, name = time_unit(max(result["wall_seconds"] for result in results))
  for index, (run, result, label) in enumerate(zip(runs, results, names)):
    look = {"color": _COLORS[index % len(_COLORS)], "linestyle": _LINES[index // len(_COLORS) % len(_LINES)]}
    width, alpha = (4.0, 0.45) if index == 0 and len(runs) > 1 else (1.3, 1.0)
    by_step.plot(*series.thin(run.steps["step"], run.steps["loss"]), linewidth=width, alpha=alpha, label=label, **look)
    times = goodput.elapsed(result, run.steps["wall"]) / unit
    for part in series.lives(run, times, run.steps["loss"]):
      by_time.plot(*series.thin(*part), linewidth=width, alpha=alpha, **look)
  _dress(by_step, "step", "Loss")
  by_step.set_ylabel("loss (nats per token)")
  _dress(by_time, f"{name} since the first start", "Loss over wall time")
  figure.legend(loc="outside lower left", fontsize=9, ncols=1 if size.is_narrow else 3)
  return figure


def _dress(axis: Axes, label: str, title: str) -> None:
  axis.set_title(title)
  axis.set_xlabel(label)
  axis.grid(axis="y")
  axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
