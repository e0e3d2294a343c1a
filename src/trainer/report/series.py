"""What the plots draw, as arrays: smoothed, short enough for a picture, and with gaps where no process ran."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from trainer.report.history import RunHistory

MAX_POINTS = 1500  # of one curve: more than a screen has columns
_SMOOTHED_FROM = 30  # steps: fewer are read one by one
_SMOOTHED_SHARE = 50  # smoothing reaches over 1/50 of the steps to either side
_SEEN = 0.02  # of the time: a shorter pause is not seen in a picture
_RARE = 1000  # one loss of so many may leave the picture, ...
_FAR_NATS, _FAR = 4.0, 2.0  # ... if it is so far, and so many times the range of the others, above the others

Curve = tuple[np.ndarray, np.ndarray]
Shorten = Callable[[np.ndarray, np.ndarray], Curve]  # `thin` or `extremes`


def thin(xs: np.ndarray, ys: np.ndarray) -> Curve:
  """At most MAX_POINTS points: means of equal groups, so that no picture depends on which points are drawn.

  A mean leaves out what is not finite; it is nan where nothing else is in the group.
  """
  group = -(-len(xs) // MAX_POINTS)
  if group <= 1:
    return xs, ys
  starts = np.arange(0, len(xs), group)
  return _group_means(xs, starts), _group_means(ys, starts)


def extremes(xs: np.ndarray, ys: np.ndarray) -> Curve:
  """At most MAX_POINTS points: the lowest and the highest of each of equal groups, in their order.

  As a line they are the envelope of a long curve, in which a spike of a single step is seen, at its step and with its
  value. What is not finite is nan.
  """
  ys = np.where(np.isfinite(ys), ys, np.nan)
  group = -(-len(xs) // (MAX_POINTS // 2))
  if len(xs) <= MAX_POINTS:
    return xs, ys
  padded = np.pad(ys, (0, -len(ys) % group), constant_values=np.nan).reshape(-1, group)
  missing, starts = np.isnan(padded), np.arange(len(padded)) * group
  lowest = np.where(missing, np.inf, padded).argmin(axis=1) + starts
  highest = np.where(missing, -np.inf, padded).argmax(axis=1) + starts
  kept = np.unique(np.concatenate([lowest, highest]))
  return xs[kept], ys[kept]


def limits(values: np.ndarray, always: np.ndarray) -> tuple[float, float] | None:
  """The vertical range of a picture in which all losses of `values` and `always` are seen; None without a finite one.

  Except a rare value that is far above the others: it would make a flat line of them. Its curve leaves at the top.
  """
  values, always = np.sort(values[np.isfinite(values)]), always[np.isfinite(always)]
  together = np.concatenate([values, always])
  if not len(together):
    return None
  low, high = together.min(), together.max()
  if len(values):
    usual = values[-1 - len(values) // _RARE]
    high = max([min(high, usual + max(_FAR_NATS, _FAR * (usual - low))), *always])
  margin = 0.07 * (high - low) or 0.1
  return low - margin, high + margin


def _group_means(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
  finite = np.isfinite(values)
  counts = np.add.reduceat(finite.astype(np.int64), starts)
  sums = np.add.reduceat(np.where(finite, values, 0.0), starts)
  return np.divide(sums, counts, out=np.full(len(starts), np.nan), where=counts > 0)


def spread(places: np.ndarray) -> np.ndarray:
  """At most about MAX_POINTS of `places`: the first of all places that would be drawn on the same spot."""
  if len(places) <= MAX_POINTS:
    return places
  width = np.ptp(places) or 1.0
  _, first = np.unique(np.round((places - places.min()) / width * MAX_POINTS), return_index=True)
  return places[first]


def dots(points: int) -> dict[str, Any]:
  """How a curve of this many points is drawn: few points have markers, because one point has no line."""
  return {"marker": "o", "markersize": 4, "zorder": 6} if points < _SMOOTHED_FROM else {}


def smooth(values: np.ndarray) -> np.ndarray | None:
  """Mean of neighbours, as far to either side as 1/50 of all values; None for a few values.

  The reach shrinks towards the beginning, where a loss falls so fast that a mean would hide it. At the end, where its
  noise is larger than its trend, only neighbours on the left are left: the curve does not end at a single step. Two
  passes, so that a single spike leaves a hump and not a step. What is not finite is left out.
  """
  if len(values) < _SMOOTHED_FROM:
    return None
  index = np.arange(len(values))
  reach = np.minimum(max(1, len(values) // _SMOOTHED_SHARE), index)
  for _ in range(2):
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    first, end = index - reach, np.minimum(index + reach + 1, len(index))
    number = counts[end] - counts[first]
    values = np.divide(sums[end] - sums[first], number, out=np.full(len(values), np.nan), where=number > 0)
  return values


def broken(run: RunHistory, rows: np.ndarray, xs: np.ndarray, ys: np.ndarray, shorten: Shorten = thin) -> Curve:
  """A curve over time of run.steps or run.evals, with a nan where the run stood still: no line may bridge that.

  The run stood still where another process goes on, and where a step came so late that the pause is seen, unless an
  evaluation took the time.
  """
  steps = run.steps
  pauses, changes = np.diff(steps["wall"]), np.diff(steps["process"]) != 0
  for event in run.of_kind("eval"):
    after = int(np.searchsorted(steps["step"], event.get("step") or 0))
    if after < len(pauses):
      pauses[after] -= float(event.get("seconds") or 0.0)
  late = pauses > max(_SEEN * pauses[~changes].sum(), 5 * np.median(steps["seconds"]))
  firsts = steps["step"][1:][changes | late]  # the first step after each pause
  parts = zip(*(np.split(column, np.searchsorted(rows["step"], firsts)) for column in (xs, ys)))
  gap = np.full(1, np.nan)
  pieces = [piece for part in parts if len(part[0]) for piece in (shorten(*part), (gap, gap))]
  return np.concatenate([piece[0] for piece in pieces])[:-1], np.concatenate([piece[1] for piece in pieces])[:-1]


def slices_per_step(run: RunHistory) -> Curve:
  """Slices that each step of the history was trained on, for step(where="pre"), without points that change nothing."""
  return _corners(run.steps["step"], run.steps["slices"])


def slices_alive(run: RunHistory) -> list[Curve]:
  """(wall times, slices alive), for step(where="post"): one curve per process.

  The number falls when a slice is lost, not when the first step without it is done, and rises when one returns.
  """
  curves = []
  for index, process in enumerate(run.processes):
    rows = run.rows[run.rows["process"] == index]
    changes = [
      event
      for event in run.of_kind("slice_down", "slice_up")
      if event["process"] == process and isinstance(event.get("slices"), list)
    ]
    if not len(rows):
      continue
    times = np.concatenate([rows["wall"] - rows["seconds"], [moment(event) for event in changes], rows["wall"][-1:]])
    alive = np.concatenate([rows["slices"], [len(event["slices"]) for event in changes], rows["slices"][-1:]])
    order = np.argsort(times, kind="stable")
    curves.append(_corners(times[order], alive[order]))
  return curves


def _corners(xs: np.ndarray, ys: np.ndarray) -> Curve:
  """The points at which ys change, the point before each, and both ends."""
  changes = np.flatnonzero(np.diff(ys))
  kept = np.unique(np.concatenate([[0], changes, changes + 1, [len(ys) - 1]]))
  return xs[kept], ys[kept]


def moment(event: dict) -> float:
  """Wall time at which it happened; the record of a lost slice is written when the loss has been detected."""
  late = event.get("detect_seconds") if event["kind"] == "slice_down" else None
  return event["wall"] - float(late or 0.0)


def speed(run: RunHistory) -> Curve:
  """(wall times, tokens per second), level for as long as a step or group of steps took, nan where there was none."""
  steps, rates = run.steps, run.tokens_per_second()
  group = -(-len(steps) // MAX_POINTS)
  cuts = np.flatnonzero(np.diff(steps["process"])) + 1
  starts = np.union1d(np.arange(0, len(steps), group), cuts)
  last = np.append(starts[1:], len(steps)) - 1
  begins, ends = steps["wall"][starts] - steps["seconds"][starts], steps["wall"][last]
  means = _group_means(rates, starts)
  pause = begins[1:] - ends[:-1]
  long = np.append(pause > (ends - begins)[1:], False)  # a short pause is drawn upright, to the next level
  gap = np.full(len(starts), np.nan)
  bridge = np.append(begins[1:], np.nan)
  xs = np.stack([begins, ends, np.where(long, gap, bridge)], axis=1).ravel()
  ys = np.stack([means, means, np.where(long, gap, means)], axis=1).ravel()
  return xs[:-1], ys[:-1]
