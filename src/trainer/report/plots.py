"""The figures of a report. Every function returns a Figure; `style` turns it into a file."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from trainer.report import series, style
from trainer.report.goodput import elapsed, without_pauses
from trainer.report.history import Events, RunHistory

# Rows of the strip of events: label, kind, colour, marker, whether a line goes down through the curves.
_ROWS = (
  ("slice lost", "slice_down", style.VERMILION, "v", True),
  ("slice returned", "slice_up", style.GREEN, "^", True),
  ("restored", "restore", style.BLUE, "D", False),
  ("process restarted", "restart", style.INK, "P", True),
  ("preempted", "preemption", style.PURPLE, "s", True),
  ("hung", "hang", style.INK, "X", True),
  ("checkpoint", "saved_persistent", style.GREY, "|", False),
  ("local checkpoint", "saved_emergency", style.GREY, "|", False),
)
_WIDTH = 10.0  # inches
_MOST_LINES = 60  # more lines would hide the curve
_MOST_EMPTY = 0.2  # of an axis of time, before the first step
_EXTREMES = ", extremes"  # after the name of a curve: its lowest and highest values, next to its means


class _Steps:
  """The horizontal axis of steps: where rows and events lie on it."""

  def rows(self, rows: np.ndarray) -> np.ndarray:
    return rows["step"]

  def curve(self, run: RunHistory, rows: np.ndarray, values: np.ndarray, shorten: series.Shorten) -> series.Curve:
    return shorten(rows["step"], values)

  def event(self, event: dict[str, Any]) -> float | None:
    return event.get("step")


class _Time:
  """The same for wall time since the first start, in the unit that suits its length."""

  def __init__(self, goodput: dict[str, Any]) -> None:
    self._goodput = goodput
    self._unit, name = style.time_unit(goodput["wall_seconds"])
    self.label = f"{name} since the first start{without_pauses(goodput)}"
    self.end = goodput["wall_seconds"] / self._unit

  def at(self, wall: Any) -> Any:
    return elapsed(self._goodput, wall) / self._unit

  def rows(self, rows: np.ndarray) -> np.ndarray:
    return self.at(rows["wall"])

  def curve(self, run: RunHistory, rows: np.ndarray, values: np.ndarray, shorten: series.Shorten) -> series.Curve:
    return series.broken(run, rows, self.rows(rows), values, shorten)

  def event(self, event: dict[str, Any]) -> float | None:
    return self.at(series.moment(event))


_Scale = _Steps | _Time
_Mark = tuple[str, str, str, bool, Events]  # a row of the strip: as in _ROWS without kind, and its events


def styled(draw: Callable[..., Figure], *arguments: Any, **named: Any) -> Figure:
  """The figure that `draw` returns, drawn in this project's style."""
  with matplotlib.rc_context(style.STYLE):
    return draw(*arguments, **named)


def loss_over_steps(run: RunHistory) -> Figure:
  """The picture of the run: events, loss and evaluations, and slices, over steps."""
  scale = _Steps()
  slices = run.total_slices > 1
  figure, strip, axes = _stack(_marks(run), scale, heights=(4.2, 0.8 if slices else 0))
  _draw_loss(axes[0], run, scale)
  _title(strip, axes[0], f"{_short(run.name)}: loss")
  if slices:
    _draw_slices(axes[1], run, [series.slices_per_step(run)], "pre", "slices\nused")
  _label_steps(axes[-1], run)
  return figure


def over_time(run: RunHistory, goodput: dict[str, Any]) -> Figure:
  """Loss, speed and slices alive over wall time."""
  scale = _Time(goodput)
  slices = run.total_slices > 1
  figure, strip, axes = _stack(_marks(run), scale, heights=(3.2, 1.6, 0.8 if slices else 0))
  _draw_loss(axes[0], run, scale)
  _title(strip, axes[0], "Loss and speed over wall time")
  if len(run.steps) > series.MAX_POINTS:
    every = scale.curve(run, run.steps, run.tokens_per_second(), series.extremes)
    axes[1].plot(*every, color=style.SKY, linewidth=0.9, alpha=0.7, label="tokens/s of a step")
  xs, speeds = series.speed(run)
  axes[1].plot(scale.at(xs), speeds, color=style.BLUE, linewidth=1.4, label="tokens/s")
  axes[0].set_xlim(_first_time(run, scale), 1.01 * scale.end)
  axes[1].set_ylabel("tokens/s")
  axes[1].set_ylim(0, 1.08 * max(speeds[np.isfinite(speeds)], default=0.0) or 1.0)
  axes[1].grid(axis="y")
  axes[1].yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
  if slices:
    _draw_slices(axes[2], run, [(scale.at(xs), ys) for xs, ys in series.slices_alive(run)], "post", "slices\nalive")
  axes[-1].set_xlabel(scale.label)
  return figure


def _first_time(run: RunHistory, scale: _Time) -> float:
  """Where the axis of time begins: at the first start, unless a slow start would leave much of the picture empty."""
  first = float(scale.at((run.rows["wall"] - run.rows["seconds"]).min()))
  marks = [scale.event(event) for *_, events in _marks(run) for event in events]
  first = min([first, *(at for at in marks if at is not None)])
  return first - 0.02 * (scale.end - first) if first > _MOST_EMPTY * scale.end else 0.0


def details(run: RunHistory) -> Figure:
  """Distribution of step times, gradient norm, learning rate, and the load of the experts if there are any."""
  parts = 3 + run.has_experts
  shape = (parts // 2, 2) if run.has_experts else (1, parts)
  figure = Figure(figsize=(_WIDTH, 2.6 * shape[0]), layout="constrained")
  times, *others = figure.subplots(*shape).flat
  _draw_step_times(times, run)
  first, second = others[:2]
  _draw_curves(first, run, ("grad_norm", "gradient norm", style.PURPLE))
  _draw_curves(second, run, ("lr", "learning rate", style.GREEN))
  first.set_title("Gradient norm before clipping")
  second.set_title("Learning rate")
  second.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
  second.set_ylim(bottom=0)
  norms = run.steps["grad_norm"]
  norms = norms[np.isfinite(norms) & (norms > 0)]
  if len(norms) and norms.max() > 30 * norms.min():
    first.set_yscale("log")
  if run.has_experts:
    third = others[2]
    loads = (("router_load_max", "most used", style.ORANGE), ("router_load_min", "least used", style.BLUE))
    _draw_curves(third, run, *loads)
    third.set_title("Load of the experts (1: even)")
    third.axhline(1, color=style.GREEN, linewidth=1)
    third.set_ylim(bottom=0)
    _legend_above(third)
  return figure


def _draw_curves(axis: Axes, run: RunHistory, *curves: tuple[str, str, str]) -> None:
  """Numbers of the steps, over the steps. curves: (field of the rows, name, colour)."""
  for field, name, color in curves:
    steps, values = run.steps["step"], run.steps[field]
    look: dict[str, Any] = {"color": color, "linewidth": 1.3, "label": name} | series.dots(len(steps))
    if len(steps) > series.MAX_POINTS:
      axis.plot(
        *series.extremes(steps, values), **look | {"linewidth": 0.9, "alpha": 0.4, "label": f"{name}{_EXTREMES}"}
      )
    axis.plot(*series.thin(steps, values), **look)
  axis.grid(axis="y")
  _label_steps(axis, nbins=4)


def _draw_step_times(axis: Axes, run: RunHistory) -> None:
  """Histogram of the seconds of the steps that count, by number of slices, with median and 99th percentile."""
  axis.set_title("Step time")
  seconds, slices = run.steps["seconds"], run.steps["slices"]
  known = np.isfinite(seconds) & (seconds > 0)
  seconds, slices = seconds[known], slices[known]
  if not len(seconds):
    return
  low, high = seconds.min(), seconds.max()
  edges = np.geomspace(low / 1.02, high * 1.02, 36)
  counts = sorted(set(slices.tolist()))
  colors = [style.BLUE, style.ORANGE, style.GREEN, style.PURPLE][: len(counts)] if len(counts) <= 4 else [style.BLUE]
  groups = [seconds[slices == count] for count in counts] if len(colors) > 1 else [seconds]
  labels = [f"{count:.0f} slice{'s' * (count != 1)}" for count in counts] if len(groups) > 1 else None
  axis.hist(groups, edges.tolist(), stacked=True, color=colors, label=labels)
  axis.set_xscale("log")
  axis.minorticks_off()
  median, late = np.percentile(seconds, (50, 99))
  axis.set_xticks([median, late], [f"median\n{median:.3g}", f"99 %\n{late:.3g}"])
  if late / median < (edges[-1] / edges[0]) ** 0.25:  # the two labels would overlap
    axis.set_xticks([median], [f"median {median:.3g}\n99 % {late:.3g}"])
  axis.set_xlabel("seconds (log scale)")
  axis.set_ylabel("steps")
  axis.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True, min_n_ticks=1))
  axis.grid(axis="y")
  axis.set_axisbelow(True)
  if labels:
    _legend_above(axis)


def _legend_above(axis: Axes) -> None:
  """A legend in the upper corner, with room for it above all that is drawn."""
  handles, labels = axis.get_legend_handles_labels()
  handles = [handle for handle, label in zip(handles, labels) if not label.endswith(_EXTREMES)]
  low, high = axis.get_ylim()
  axis.set_ylim(low, high + (high - low) * (0.06 + 0.11 * len(handles)))
  axis.legend(handles=handles, fontsize=9, loc="upper right", borderaxespad=0.2, borderpad=0.2)


def _stack(marks: list[_Mark], scale: _Scale, *, heights: Sequence[float]) -> tuple[Figure, Axes, list[Axes]]:
  """A figure of rows that share the horizontal axis: the strip of events on top, then one Axes per height > 0."""
  heights = [height for height in heights if height]
  strip_height = max(0.12, 0.24 * len(marks))
  figure = Figure(figsize=(_WIDTH, 0.9 + strip_height + sum(heights)))
  figure.set_layout_engine("constrained")
  rows = figure.subplots(1 + len(heights), 1, sharex=True, height_ratios=[strip_height, *heights], squeeze=False)[:, 0]
  strip, axes = rows[0], list(rows[1:])
  strip.set_ylim(-0.5, max(0.5, len(marks) - 0.5))
  strip.invert_yaxis()
  strip.set_yticks(range(len(marks)), [label for label, *_ in marks], fontsize=9)
  strip.tick_params(axis="both", length=0, labelbottom=False)
  for spine in strip.spines.values():
    spine.set_visible(False)
  for row, (label, color, marker, has_line, events) in enumerate(marks):
    xs = series.spread(np.array([x for x in map(scale.event, events) if x is not None], np.float64))
    dot: dict[str, Any] = {"color": color, "marker": marker, "s": 60 if marker == "|" else 42}
    strip.scatter(xs, np.full(len(xs), row), label=label, zorder=3, clip_on=False, **dot)
    if has_line and len(xs) <= _MOST_LINES:
      for axis in axes:
        for x in xs:
          axis.axvline(x, color=color, linewidth=0.9, linestyle=(0, (4, 3)), alpha=0.7, zorder=0)
  return figure, strip, axes


def _marks(run: RunHistory) -> list[_Mark]:
  events: Events = [event for event in run.events if event["kind"] != "restore" or event.get("tier") != "none"]
  events += [event | {"kind": f"saved_{event.get('tier')}"} for event in run.of_kind("checkpoint_saved")]
  # A second run_start is a restart; its step is the first that was done after it.
  events += [event | {"kind": "restart", "step": _next_step(run, event)} for event in run.of_kind("run_start")[1:]]
  marks = []
  for label, kind, color, marker, has_line in _ROWS:
    found = [event for event in events if event["kind"] == kind]
    if found:
      marks.append((f"{label} ({len(found):,})", color, marker, has_line, found))
  return marks


def _next_step(run: RunHistory, event: dict[str, Any]) -> int | None:
  later = run.rows["step"][run.rows["wall"] >= event["wall"]]
  return int(later.min()) if len(later) else None


def _title(strip: Axes, labelled: Axes, text: str) -> None:
  """Title on the left. The legend of `labelled` follows on the right: over no curve."""
  handles, labels = labelled.get_legend_handles_labels()
  look: dict[str, Any] = {"fontsize": 9, "columnspacing": 1.2, "handlelength": 1.4, "borderaxespad": 0.2}
  strip.set_title(text, pad=8)
  look |= {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "ncols": len(labels)}
  strip.legend(handles, labels, **look).set_in_layout(False)  # the pad keeps its place: it must not move the axes


def _draw_loss(axis: Axes, run: RunHistory, scale: _Scale) -> None:
  """Loss of the history, of lost steps, of evaluations, and the lines that a person compares them with."""
  losses = run.steps["loss"]
  if (smoothed := series.smooth(losses)) is None:
    look: dict[str, Any] = {"color": style.BLUE, "linewidth": 1.4} | series.dots(len(losses))
    axis.plot(*scale.curve(run, run.steps, losses, series.thin), label="training", **look)
  else:
    curve = scale.curve(run, run.steps, losses, series.extremes)
    axis.plot(*curve, label="training", color=style.SKY, linewidth=0.9, alpha=0.7)
    curve = scale.curve(run, run.steps, smoothed, series.thin)
    axis.plot(*curve, label="training, smoothed", color=style.BLUE, linewidth=1.8)
  if len(run.lost):
    dot: dict[str, Any] = {"marker": "x", "s": 22} if len(run.lost) <= 50 else {"marker": ".", "s": 4}
    crosses = series.extremes(scale.rows(run.lost), run.lost["loss"])
    axis.scatter(*crosses, color=style.VERMILION, label="done again", zorder=3, **dot)
  if len(run.evals):
    _draw_evaluations(axis, run, scale)
  references = _references(run)
  for line in references:
    _draw_reference(axis, line)
  evaluations = [run.evals["eval_loss"], *run.eval_sets.values()]
  always = np.concatenate([np.array([line.value for line in references]), *evaluations])
  axis.set_ylim(series.limits(run.rows["loss"], always))
  axis.set_ylabel("loss (nats per token)")
  axis.grid(axis="y")


def _draw_evaluations(axis: Axes, run: RunHistory, scale: _Scale) -> None:
  """The curve of eval_loss, and thinner curves of the first other sets. The page has a table of all sets."""
  few: dict[str, Any] = {"marker": "o", "markersize": 6, "markeredgecolor": style.PAPER, "markeredgewidth": 0.8}
  dot = few if len(run.evals) <= 30 else {}
  main = run.evals["eval_loss"]
  others = {name: losses for name, losses in run.eval_sets.items() if not np.array_equal(losses, main, equal_nan=True)}
  of_main = next((f" ({name})" for name in run.eval_sets if name not in others), "")
  for color, (name, losses) in zip((style.PURPLE, style.GREEN, style.BROWN, style.VIOLET), others.items()):
    look: dict[str, Any] = {"linewidth": 1.0, "linestyle": "--", "markersize": 4} if dot else {"linewidth": 0.8}
    curve = scale.curve(run, run.evals, losses, series.extremes)
    axis.plot(*curve, color=color, label=f"evaluation ({name})", zorder=4, **(dot | look))
  curve = scale.curve(run, run.evals, main, series.extremes)
  axis.plot(*curve, color=style.ORANGE, linewidth=1.2, label=f"evaluation{of_main}", zorder=4, **dot)


@dataclasses.dataclass(frozen=True)
class _Reference:
  """A horizontal line to compare a loss with; its label stands above or below it."""

  name: str
  value: float
  color: str
  above: bool = True


def _references(run: RunHistory) -> list[_Reference]:
  """The losses of a uniform guess and of a unigram model, the latter for each curve that the picture has."""
  found = []
  if run.start.get("vocab_size"):
    found.append(_Reference("uniform: ln V", math.log(run.start["vocab_size"]), style.GREY))
  train, held_out = run.start.get("unigram_entropy"), run.start.get("unigram_eval_loss")
  if not len(run.evals):
    held_out = None
  if train is not None:
    # With two lines the higher has its label above and the lower below, as they may be close together.
    found.append(_Reference("unigram model, training", train, style.BLUE, above=held_out is None or train >= held_out))
  if held_out is not None:
    found.append(
      _Reference("unigram model, evaluation", held_out, style.ORANGE, above=train is None or held_out > train)
    )
  return found


def _draw_reference(axis: Axes, line: _Reference) -> None:
  axis.axhline(line.value, color=line.color, linewidth=1, linestyle=":", zorder=0)
  place, where = (0.995, line.value), ("axes fraction", "data")
  look: dict[str, Any] = {"ha": "right", "va": "bottom" if line.above else "top", "color": style.GREY}
  look |= {"fontsize": 9, "zorder": 5}
  look["bbox"] = {"facecolor": style.PAPER, "alpha": 0.8, "linewidth": 0, "pad": 0.5}  # readable also on a curve
  axis.annotate(f"{line.name} = {line.value:.2f}", place, (0, 2 if line.above else -2), where, "offset points", **look)


def _draw_slices(
  axis: Axes, run: RunHistory, curves: list[series.Curve], where: Literal["pre", "post"], label: str
) -> None:
  for xs, ys in curves:
    axis.fill_between(xs, ys, step=where, color=style.GREEN, alpha=0.25, linewidth=0)
    axis.step(xs, ys, where=where, color=style.GREEN, linewidth=1.4, label=label.replace("\n", " "))
  axis.set_ylim(0, run.total_slices + 0.4)
  axis.set_yticks(sorted({0, run.total_slices}))
  axis.set_ylabel(label)


def _label_steps(axis: Axes, run: RunHistory | None = None, nbins: int = 6) -> None:
  """Labels the steps; with `run`, also the tokens that it had trained on after each of them."""
  axis.set_xlabel("step" if run is None else "step, and tokens so far")
  first, last = axis.get_xlim()
  if last - first < 2:  # one or two steps: their ticks are whole numbers too
    axis.set_xlim(math.ceil(first) - 0.7, math.floor(last) + 0.7)
  axis.xaxis.set_major_locator(MaxNLocator(nbins=nbins, integer=True, min_n_ticks=1, steps=[1, 2, 2.5, 5, 10]))
  rows = np.zeros(1, [("step", float), ("tokens", float)])  # nothing before the first step
  if run is not None:
    few = run.steps[["step", "tokens"]][:: 1 + len(run.steps) // series.MAX_POINTS]
    rows = np.concatenate([rows, few, run.steps[["step", "tokens"]][-1:]])

  def label(step: float, _: object) -> str:
    inside = run is not None and 0 <= step <= rows["step"][-1]
    return f"{step:,.0f}" + (f"\n{style.short_number(np.interp(step, rows['step'], rows['tokens']))}" if inside else "")

  axis.xaxis.set_major_formatter(label)


def _short(name: str) -> str:
  return name if len(name) <= 40 else f"{name[:37]}..."
