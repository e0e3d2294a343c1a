"""The pictures of a report. Okabe and Ito's colours: told apart by colour-blind readers, and in grey by lightness.

Figures are built without pyplot, so there is no global state and no display. Every function returns PNG bytes.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from trainer.report.history import Records, Run

BLACK, ORANGE, SKY, GREEN, YELLOW = "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILION, PURPLE, GREY, LIGHT = "#0072B2", "#D55E00", "#CC79A7", "#6E6E6E", "#D9D9D9"

_STYLE: dict[Any, Any] = {
  "font.size": 10,
  "font.family": "sans-serif",
  "axes.spines.top": False,
  "axes.spines.right": False,
  "axes.edgecolor": GREY,
  "axes.labelcolor": "#222222",
  "axes.titlelocation": "left",
  "axes.titlesize": 12,
  "xtick.color": "#444444",
  "ytick.color": "#444444",
  "grid.color": "#E6E6E6",
  "figure.facecolor": "white",
  "legend.frameon": False,
}

# Rows of the strip of events: label, kind, colour, marker, whether a line goes down through the curves.
_ROWS = (
  ("slice lost", "slice_down", VERMILION, "v", True),
  ("slice returned", "slice_up", GREEN, "^", True),
  ("restored", "restore", BLUE, "D", False),
  ("process restarted", "restart", BLACK, "P", True),
  ("preempted", "preemption", PURPLE, "s", True),
  ("hung", "hang", BLACK, "X", True),
  ("checkpoint", "saved_persistent", GREY, "|", False),
  ("local checkpoint", "saved_emergency", GREY, "|", False),
)

_MAX_POINTS = 3000


@dataclasses.dataclass(frozen=True)
class _Mark:
  """One row of the strip of events."""

  label: str
  color: str
  marker: str
  line: bool
  events: Records


def loss_over_steps(run: Run) -> bytes:
  """The picture of the run: events, loss and evaluations, and slices alive, over steps."""
  with matplotlib.rc_context(_STYLE):
    figure, strip, axes = _stack(_marks([run]), _step_of, heights=(4.2, 0.8 if run.total_slices > 1 else 0))
    _draw_loss(axes[0], run, _step_of)
    _title(strip, f"{_short(run.name)}: training loss", axes[0])
    if run.total_slices > 1:
      _draw_slices(axes[1], run, _step_of)
    _label_steps(axes[-1])
    return _png(figure)


def over_time(run: Run) -> bytes:
  """Loss, speed and slices alive over wall time."""
  unit, name = _time_unit(run)

  def when(record: dict[str, Any]) -> float:
    return (record["wall"] - run.goodput["began"]) / unit

  with matplotlib.rc_context(_STYLE):
    heights = (3.2, 1.6, 0.8 if run.total_slices > 1 else 0)
    figure, strip, axes = _stack(_marks([run]), when, heights=heights)
    _draw_loss(axes[0], run, when)
    _title(strip, "the same over wall time", axes[0])
    axes[1].plot(*_speed(run, when, unit), color=BLUE, linewidth=1.4)
    axes[0].set_xlim(0, run.goodput["wall_seconds"] / unit)
    axes[1].set_ylabel("tokens/s")
    axes[1].set_ylim(bottom=0)
    axes[1].grid(axis="y")
    axes[1].yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    if run.total_slices > 1:
      _draw_slices(axes[2], run, when)
    axes[-1].set_xlabel(name)
    return _png(figure)


def optimizer(run: Run) -> bytes:
  """Gradient norm and learning rate over steps."""
  with matplotlib.rc_context(_STYLE):
    figure = Figure(figsize=(10, 2.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axis, field, color in ((left, "grad_norm", PURPLE), (right, "lr", GREEN)):
      axis.plot(*_thin([r["step"] for r in run.steps], [r[field] for r in run.steps]), color=color, linewidth=1.2)
      _label_steps(axis)
      axis.grid(axis="y")
    left.set_title("gradient norm (before clipping)")
    right.set_title("learning rate")
    right.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
    norms = [r["grad_norm"] for r in run.steps if math.isfinite(r["grad_norm"]) and r["grad_norm"] > 0]
    if norms and max(norms) > 30 * min(norms):
      left.set_yscale("log")
    return _png(figure)


def goodput_bar(run: Run) -> bytes:
  """Where the wall time went: one bar of 100 %, and beneath it a row for each of its parts."""
  colors = {
    "steps": GREEN,
    "compile": SKY,
    "init": BLUE,
    "eval": PURPLE,
    "profile": "#5E3C99",
    "checkpoint": YELLOW,
    "snapshot": "#F7EE9C",
    "restore": ORANGE,
    "data_wait": "#8C6D31",
    "wait_slices": "#B35806",
    "steps_lost": VERMILION,
    "down": BLACK,
    "other": LIGHT,
  }
  names = {"steps": "steps that count (goodput)", "steps_lost": "steps lost", "data_wait": "data wait"}
  names |= {
    "eval": "evaluation",
    "wait_slices": "waiting for slices",
    "checkpoint": "checkpoint (blocking)",
    "down": "no process",
  }
  shares = [(bucket, run.goodput["percent"][bucket]) for bucket in colors if run.goodput["percent"][bucket] > 0]
  with matplotlib.rc_context(_STYLE):
    figure = Figure(figsize=(10, 1.15 + 0.2 * math.ceil(len(shares) / 3)), layout="constrained")
    axis = figure.subplots()
    left = 0.0
    for bucket, share in shares:
      label = f"{names.get(bucket, bucket)}: {share:.2f} %"
      axis.barh(0, share, left=left, color=colors[bucket], edgecolor="white", linewidth=0.6, label=label)
      left += share
    axis.set_xlim(0, 100)
    axis.set_axis_off()
    axis.set_title(f"goodput {run.goodput['goodput_percent']:.2f} % of {_seconds(run.goodput['wall_seconds'])}")
    figure.legend(loc="outside lower left", ncols=3)
    return _png(figure)


def comparison(runs: Sequence[Run], difference: list[tuple[int, float]], summary: str) -> bytes:
  """Losses of two runs over steps with the events of both, and beneath their relative difference per step."""
  with matplotlib.rc_context(_STYLE):
    figure, strip, axes = _stack(_marks(runs, hidden="saved_"), _step_of, heights=(3.8, 1.5))
    strip.set_title(summary, pad=8)
    looks = ((BLUE, 4.0, 0.45, "-"), (BLACK, 1.2, 1.0, "--"))
    for run, (color, width, alpha, line) in zip(runs, looks, strict=True):
      xs, ys = _thin([r["step"] for r in run.steps], [r["loss"] for r in run.steps])
      lost = len(run.of_kind("slice_down"))
      label = f"{_short(run.name)}: {lost or 'no'} slice{'s' if lost > 1 else ''} lost"
      axes[0].plot(xs, ys, color=color, linewidth=width, alpha=alpha, linestyle=line, label=label)
    axes[0].legend(loc="upper right")
    axes[0].set_ylabel("loss (nats per token)")
    axes[0].grid(axis="y")
    floor, top = 1e-9, max([1e-4, *(4 * value for _, value in difference if math.isfinite(value))])
    # Equal losses have no place on a log scale: they are drawn on the bottom line, infinite ones at the top.
    values = [min(max(value, floor), top) for _, value in difference]
    axes[1].scatter([step for step, _ in difference], values, s=8, color=BLUE)
    axes[1].set_yscale("log")
    axes[1].set_yticks([floor, 1e-7, 1e-5, 1e-3, 1e-1], ["equal", "1e-7", "1e-5", "1e-3", "0.1"])
    axes[1].minorticks_off()
    axes[1].set_ylim(floor / 2, top)
    axes[1].set_ylabel("relative\ndifference")
    axes[1].grid(axis="y")
    _label_steps(axes[1])
    return _png(figure)


def _stack(
  marks: list[_Mark], place: Callable[[dict[str, Any]], float | None], *, heights: Sequence[float]
) -> tuple[Figure, Axes, list[Axes]]:
  """A figure of rows that share the horizontal axis: the strip of events on top, then one Axes per height > 0."""
  heights = [height for height in heights if height]
  strip_height = max(0.12, 0.24 * len(marks))
  figure = Figure(figsize=(10, 0.9 + strip_height + sum(heights)), layout="constrained")
  rows = figure.subplots(1 + len(heights), 1, sharex=True, height_ratios=[strip_height, *heights], squeeze=False)[:, 0]
  strip, axes = rows[0], list(rows[1:])
  strip.set_ylim(-0.5, max(0.5, len(marks) - 0.5))
  strip.invert_yaxis()
  strip.set_yticks(range(len(marks)), [mark.label for mark in marks], fontsize=9)
  strip.tick_params(axis="both", length=0, labelbottom=False)
  for spine in strip.spines.values():
    spine.set_visible(False)
  for row, mark in enumerate(marks):
    xs = [x for x in map(place, mark.events) if x is not None]
    size = 60 if mark.marker == "|" else 42
    strip.scatter(xs, [row] * len(xs), color=mark.color, marker=mark.marker, s=size, zorder=3, clip_on=False)
    if mark.line and len(xs) <= 60:  # more lines would hide the curve
      for axis in axes:
        for x in xs:
          axis.axvline(x, color=mark.color, linewidth=0.9, linestyle=(0, (4, 3)), alpha=0.7, zorder=0)
  return figure, strip, axes


def _marks(runs: Sequence[Run], hidden: str = "") -> list[_Mark]:
  """The rows of the strip that have events, but for kinds that begin with `hidden`."""
  events: Records = []
  for run in runs:
    events += [event for event in run.events if event["kind"] != "restore" or event.get("tier") != "none"]
    events += [event | {"kind": f"saved_{event.get('tier')}"} for event in run.of_kind("checkpoint_saved")]
    # A second run_start is a restart; its step is the first that was done after it.
    events += [event | {"kind": "restart", "step": _next_step(run, event)} for event in run.of_kind("run_start")[1:]]
  found = ((row, [event for event in events if event["kind"] == row[1]]) for row in _ROWS)
  return [
    _Mark(f"{row[0]} ({len(events)})", *row[2:], events)
    for row, events in found
    if events and not (hidden and row[1].startswith(hidden))
  ]


def _next_step(run: Run, event: dict[str, Any]) -> int | None:
  later = [record["step"] for record in [*run.lost, *run.steps] if record["wall"] >= event["wall"]]
  return min(later, default=None)


def _step_of(event: dict[str, Any]) -> float | None:
  return event.get("step")


def _title(strip: Axes, text: str, labelled: Axes) -> None:
  """Title on the left and, in the same row on the right, the legend of `labelled`: it can cover no curve there."""
  strip.set_title(text, pad=8)
  handles, labels = labelled.get_legend_handles_labels()
  place: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "borderaxespad": 0.2}
  strip.legend(handles, labels, ncols=len(labels), fontsize=9, columnspacing=1.4, handlelength=1.6, **place)


def _draw_loss(axis: Axes, run: Run, x: Callable[[dict[str, Any]], float | None]) -> None:
  """Loss of the history, of lost steps, of evaluations, and the lines that a person compares them with."""
  losses = [record["loss"] for record in run.steps]
  if len(losses) > 300:
    for part in _lives(run, x, losses):
      axis.plot(*_thin(*part), color=SKY, linewidth=0.8, alpha=0.6)
    label, shown, width = "training loss (smoothed)", _smooth(losses), 1.6
  else:
    label, shown, width = "training loss", losses, 1.4
  for part in _lives(run, x, shown):
    axis.plot(*_thin(*part), color=BLUE, linewidth=width, label=label)
    label = "_"  # the legend names the first life only
  if run.lost:
    few = len(run.lost) <= 50
    marker: dict[str, Any] = {"marker": "x", "s": 22} if few else {"marker": ".", "s": 4}
    lost = run.lost[:: math.ceil(len(run.lost) / _MAX_POINTS)]
    places: list[Any] = [x(record) for record in lost]
    axis.scatter(places, [r["loss"] for r in lost], color=VERMILION, label="done again", zorder=3, **marker)
  evals = [record for record in run.evals if "wall" in record]
  if evals:
    style: dict[str, Any] = {"color": ORANGE, "linewidth": 1.0, "marker": "o", "zorder": 4}
    style |= {"markeredgecolor": BLACK, "markeredgewidth": 0.7, "markersize": 6} if len(evals) <= 30 else {}
    style |= {} if len(evals) <= 30 else {"markersize": 2.5}
    spots: list[Any] = [x(record) for record in evals]
    axis.plot(spots, [r["eval_loss"] for r in evals], label="evaluation", **style)
  references = _references(run)
  for line in references:
    _draw_reference(axis, line)
  finite = sorted(loss for loss in losses if math.isfinite(loss))
  if finite:
    # A spike of a thousandth of the steps may leave the picture; the reference lines may not.
    low, high = finite[0], finite[min(len(finite) - 1, int(0.999 * len(finite)))]
    heights = [line.value for line in references]
    low, high = min([low, *heights]), max([high, *heights])
    margin = 0.07 * (high - low) or 0.1
    axis.set_ylim(low - margin, high + margin)
  axis.set_ylabel("loss (nats per token)")
  axis.grid(axis="y")


@dataclasses.dataclass(frozen=True)
class _Reference:
  """A horizontal line to compare a loss with; its label stands above or below it."""

  name: str
  value: float
  color: str
  above: bool = True


def _references(run: Run) -> list[_Reference]:
  """The losses of a uniform guess and of a unigram model, the latter for each curve that the picture has."""
  found = []
  if run.start.get("vocab_size"):
    found.append(_Reference("uniform: ln V", math.log(run.start["vocab_size"]), GREY))
  train, held_out = run.start.get("unigram_entropy"), run.start.get("unigram_eval_loss")
  if not run.evals:
    held_out = None
  if train is not None:
    # With two lines the higher has its label above and the lower below, as they may be close together.
    found.append(_Reference("unigram model, training", train, BLUE, above=held_out is None or train >= held_out))
  if held_out is not None:
    found.append(_Reference("unigram model, evaluation", held_out, ORANGE, above=train is None or held_out > train))
  return found


def _draw_reference(axis: Axes, line: _Reference) -> None:
  axis.axhline(line.value, color=line.color, linewidth=1, linestyle=":", zorder=0)
  place, where = (0.995, line.value), ("axes fraction", "data")
  style: dict[str, Any] = {"ha": "right", "va": "bottom" if line.above else "top", "color": line.color}
  style |= {"fontsize": 9, "zorder": 5}
  style["bbox"] = {"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 0.5}  # readable also on a curve
  offset = (0, 2 if line.above else -2)
  axis.annotate(f"{line.name} = {line.value:.2f}", place, offset, where, "offset points", **style)


def _draw_slices(axis: Axes, run: Run, x: Callable[[dict[str, Any]], float | None]) -> None:
  for xs, ys in _lives(run, x, [record["slices"] for record in run.steps]):
    axis.fill_between(xs, ys, step="mid", color=GREEN, alpha=0.25, linewidth=0)
    axis.step(xs, ys, where="mid", color=GREEN, linewidth=1.4)
  axis.set_ylim(0, run.total_slices + 0.4)
  axis.set_yticks(sorted({0, run.total_slices}))
  axis.set_ylabel("slices\nalive")


def _speed(run: Run, when: Callable[[dict[str, Any]], float], unit: float) -> tuple[list[float], list[float]]:
  """Tokens per second, level for as long as a step took (or a group of steps), with gaps where there was no step."""
  group = math.ceil(len(run.steps) / _MAX_POINTS)
  pairs = itertools.groupby(zip(run.steps, run.tokens_per_second(), strict=True), key=lambda pair: pair[0]["process"])
  xs: list[float] = []
  ys: list[float] = []
  for _, life in pairs:
    steps = list(life)
    for part in (steps[i : i + group] for i in range(0, len(steps), group)):
      begin, end = when(part[0][0]) - part[0][0]["seconds"] / unit, when(part[-1][0])
      if xs and begin - xs[-1] > end - begin:
        xs.append(math.nan)
        ys.append(math.nan)
      elif xs:  # a short pause: upright, not slanting, to the next level
        xs.append(begin)
        ys.append(ys[-1])
      xs += [begin, end]
      ys += [statistics.fmean(speed for _, speed in part)] * 2
  return xs, ys


def _label_steps(axis: Axes) -> None:
  axis.set_xlabel("step")
  axis.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
  axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _lives(
  run: Run, x: Callable[[dict[str, Any]], float | None], values: Sequence[float]
) -> list[tuple[list[float], list[float]]]:
  """(places, values) of the steps of each process: over time, no curve may run on while there was no process.

  Over steps there are no such gaps, and all is one part.
  """
  pairs = zip(run.steps, values, strict=True)
  parts = itertools.groupby(pairs, key=lambda pair: "" if x is _step_of else pair[0]["process"])
  lives = [list(life) for _, life in parts]
  return [([x(record) or 0.0 for record, _ in life], [value for _, value in life]) for life in lives]


def _smooth(values: Sequence[float]) -> list[float]:
  """Exponential moving average over about 1 % of the run; non-finite values are passed over."""
  keep = 1 - 1 / max(10, len(values) / 100)
  smoothed, average = [], math.nan
  for value in values:
    if math.isfinite(value):
      average = value if math.isnan(average) else keep * average + (1 - keep) * value
    smoothed.append(average)
  return smoothed


def _thin(xs: Sequence[float], ys: Sequence[float]) -> tuple[list[float], list[float]]:
  """At most _MAX_POINTS points: means of equal groups, so that no picture depends on which points are drawn."""
  group = math.ceil(len(xs) / _MAX_POINTS)
  if group <= 1:
    return list(xs), list(ys)
  starts = range(0, len(xs), group)
  means = [[sum(part) / len(part) for part in (values[i : i + group] for i in starts)] for values in (xs, ys)]
  return means[0], means[1]


def _time_unit(run: Run) -> tuple[float, str]:
  wall = run.goodput["wall_seconds"]
  if wall < 600:
    return 1.0, "seconds since the first start"
  return (60.0, "minutes since the first start") if wall < 4 * 3600 else (3600.0, "hours since the first start")


def _seconds(value: float) -> str:
  return f"{value:.0f} s" if value < 600 else f"{value / 60:.0f} min" if value < 4 * 3600 else f"{value / 3600:.1f} h"


def _short(name: str) -> str:
  return name if len(name) <= 40 else f"{name[:37]}..."


def _png(figure: Figure) -> bytes:
  buffer = io.BytesIO()
  figure.savefig(buffer, format="png", dpi=144)
  return buffer.getvalue()
