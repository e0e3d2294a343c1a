"""Goodput: where the wall time of a run went, in buckets that sum to 100 %, across restarts of the process.

Computed after the run from events.jsonl and metrics.jsonl: it costs no training time and can be repeated. Every
microsecond between the first and the last record belongs to exactly one bucket, except the time from the end of a
complete run (exit code 0) until it was started again. The records claim intervals; where claims overlap (a compilation
inside a step), the bucket that comes first in BUCKETS wins. Google's ml-goodput-measurement has the same categories,
but adds them up separately.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
from typing import Any

import numpy as np

from trainer.observe import files
from trainer.observe.log import Log
from trainer.observe.metrics import format_duration
from trainer.report.history import Events, RunHistory

GOODPUT_FILE = "goodput.json"

# Bucket -> what it holds, in order of precedence.
BUCKETS = {
  "compile": "XLA compilation in the foreground",
  "restore": "restoring state from any tier",
  "wait_slices": "waiting for enough slices",
  "checkpoint": "saving checkpoints while nothing else was done",
  "snapshot": "copying the state to host memory, as far as it blocks the training",
  "eval": "evaluation, and the sample at the end",
  "profile": "writing profiles",
  "rehearsal": "waiting for the moment of a rehearsed fault",
  "detect": "from the last good step, or the start of the attempt, until the fault was detected",
  "steps_lost": "steps that were done again",
  "data_wait": "steps that waited for data",
  "steps": "steps that count: goodput",
  "init": "start of the process or attempt until its first step",
  "down": "no process was running",
  "other": "everything else",
}
# Claims in order of precedence, and the bucket of each. A checkpoint that is committed in the background costs only
# time in which nothing else was done: the wait at the end of a run.
_BACKGROUND = "checkpoint in the background"
_RANKS = {name: name for name in BUCKETS if name not in ("down", "other")}
_RANKS |= {_BACKGROUND: "checkpoint", "down": "down", "other": "other"}

# Event kind -> bucket of the `seconds` before the event, during which the loop waited.
_TIMED = {
  "compile": "compile",
  "restore": "restore",
  "wait_slices": "wait_slices",
  "eval": "eval",
  "sample": "eval",
  "profile": "profile",
  "rehearsal_wait": "rehearsal",
  "init_done": "init",
  "run_start": "init",
}
# The same for events during which the loop waited only for the first `blocking_seconds` of the `seconds`.
_BLOCKING = {"checkpoint_saved": "checkpoint", "snapshot": "snapshot"}

# Rank -> arrays of [start, end) in microseconds. An interval belongs to its rank unless one of higher precedence claims
# it too.
_Claims = dict[str, list[np.ndarray]]


def compute(run: RunHistory) -> dict[str, Any]:
  """Goodput of a run.

  Returns began (epoch seconds); idle [[begin, end], ...] (epoch seconds): no time of the run, because the run was
  complete; wall_seconds (without them); seconds and percent {bucket: value} with every bucket of BUCKETS,
  summing to wall_seconds and to 100 (percent in steps of 0.01, largest remainder); goodput_percent; steps (that
  count), steps_lost, processes, attempts; and slice_percent: slices alive, averaged over the time of the steps that
  count, of the slices of the run.
  """
  claims: _Claims = collections.defaultdict(list)
  idle: list[list[float]] = []
  begin = at = removed = 0  # at: end of the previous life; lives never overlap, whatever the wall clock says
  lives = _lives(run)
  for index, life in enumerate(lives):
    found, first, last = _claims_of_life(life)
    if index == 0:
      begin = at = first
    elif first > at and lives[index - 1].is_complete:
      idle.append([at / 1e6, first / 1e6])
      removed += first - at
    elif first > at:
      claims["down"].append(np.array([[at, first]]) - removed)
    at = max(at, first)
    for rank, intervals in found.items():
      claims[rank] += [interval + (at - first - removed) for interval in intervals]
    at += last - first
  assert lives
  at -= removed
  claims["other"].append(np.array([[begin, at]]))
  micros = _partition(claims)
  assert sum(micros.values()) == at - begin
  percent = _percent(micros)
  return {
    "began": begin / 1e6,
    "idle": idle,
    "wall_seconds": (at - begin) / 1e6,
    "goodput_percent": percent["steps"],
    "percent": percent,
    "seconds": {bucket: value / 1e6 for bucket, value in micros.items()},
    "steps": len(run.steps),
    "steps_lost": len(run.lost),
    "processes": len(lives),
    "attempts": len(run.of_kind("attempt_start")),
    "slice_percent": _slice_percent(run),
  }


def elapsed(result: dict[str, Any], wall: Any) -> Any:
  """Seconds of the run from its first record to the moments `wall` (epoch seconds). result: of `compute`."""
  return wall - result["began"] - sum(np.clip(wall - begin, 0, end - begin) for begin, end in result["idle"])


def without_pauses(result: dict[str, Any]) -> str:
  """What the wall time of the run leaves out, in words; "" if that is nothing. result: of `compute`."""
  idle = sum(end - begin for begin, end in result["idle"])
  return f", without {format_duration(idle)} after it was complete" if idle else ""


def _slice_percent(run: RunHistory) -> float | None:
  total = max((event.get("num_slices") or 0 for event in run.of_kind("run_start")), default=0)
  seconds = run.steps["seconds"].sum()
  if not total or not seconds:
    return None
  return round(100 * float((run.steps["seconds"] * run.steps["slices"]).sum() / seconds / total), 2)


def write(run: RunHistory, result: dict[str, Any], log: Log) -> None:
  """Writes the result of `compute` to {run}/goodput.json, and one log line."""
  files.write_text(run.directory, GOODPUT_FILE, json.dumps(result, indent=2) + "\n")
  log.line(format_line(result))


def format_line(result: dict[str, Any]) -> str:
  """`goodput: 91.20% of 0:02:03 (compile 5.10%, init 2.00%, ...), steps lost: 1`, without empty buckets."""
  rest = sorted(((share, name) for name, share in result["percent"].items() if name != "steps" and share), reverse=True)
  detail = ", ".join(f"{name} {share:.2f}%" for share, name in rest)
  wall = format_duration(result["wall_seconds"]) + without_pauses(result)
  return f"goodput: {result['goodput_percent']:.2f}% of {wall} ({detail}), steps lost: {result['steps_lost']}"


@dataclasses.dataclass(frozen=True)
class _Life:
  events: Events
  rows: np.ndarray
  redone: np.ndarray

  @property
  def is_complete(self) -> bool:
    """Whether the process has ended because all steps were done."""
    return bool(self.events) and self.events[-1]["kind"] == "run_end" and self.events[-1].get("exit") == 0

  def edges(self) -> tuple[float, float, float]:
    """Wall time of the first record; monotonic time of the first and of the last one."""
    ends = [(row["monotonic"], 1, row["wall"]) for row in self.rows[[0, -1]]] if len(self.rows) else []
    ends += [(event["monotonic"], 0, event["wall"]) for event in (*self.events[:1], *self.events[-1:])]
    return min(ends)[2], min(ends)[0], max(ends)[0]


def _lives(run: RunHistory) -> list[_Life]:
  events: dict[str, Events] = {process: [] for process in run.processes}
  for event in run.events:
    events[event["process"]].append(event)
  lives = []
  for index, process in enumerate(run.processes):
    mine = np.flatnonzero(run.rows["process"] == index)
    mine = mine[np.argsort(run.rows["monotonic"][mine], kind="stable")]
    ordered = sorted(events[process], key=lambda event: event["monotonic"])
    if ordered or len(mine):
      lives.append(_Life(ordered, run.rows[mine], run.redone[mine]))
  return sorted(lives, key=lambda life: life.edges()[0])


def _claims_of_life(life: _Life) -> tuple[_Claims, int, int]:
  """Claims of one process, and its first and last moment in microseconds of wall time.

  Inside a life only the monotonic clock counts. The wall clock gives the time of the life's first record.
  """
  wall, first, last = life.edges()
  claims: _Claims = collections.defaultdict(list)
  step_ends = (wall + life.rows["monotonic"] - first) * 1e6
  step_begins = step_ends - 1e6 * life.rows["seconds"]
  data_waits = np.clip(np.nan_to_num(life.rows["data_wait"], posinf=0.0), 0.0, life.rows["seconds"])
  _claim(claims, "steps", step_begins[~life.redone], step_ends[~life.redone])
  _claim(claims, "steps_lost", step_begins[life.redone], step_ends[life.redone])
  _claim(claims, "data_wait", step_begins, step_begins + 1e6 * data_waits)
  ready = seen = -math.inf  # the start of the attempt; the last good moment before a fault that is claimed already
  attempt_ended = -math.inf
  for event in life.events:
    kind, now = event["kind"], (wall + event["monotonic"] - first) * 1e6
    began = now - 1e6 * float(event.get("seconds") or 0.0)
    if kind in ("attempt_start", "init_done"):
      ready = now
    if kind in _BLOCKING:
      blocked = 1e6 * float(event.get("blocking_seconds") or 0.0)
      began = min(began, now - blocked)
      _claim(claims, _BLOCKING[kind], began, began + blocked)
      _claim(claims, _BACKGROUND, began, now)
    elif kind in _TIMED and not event.get("background"):
      _claim(claims, _TIMED[kind], max(began, attempt_ended), now)
    elif kind in ("slice_down", "hang"):
      newest = int(np.searchsorted(life.rows["monotonic"], event["monotonic"])) - 1
      good = max(ready, step_ends[newest]) if newest >= 0 else ready
      if good > seen:
        _claim(claims, "detect", good, now)
        seen = good
    elif kind == "attempt_end":
      attempt_ended = now  # what is timed after it cannot have begun before it
  starts = [int(interval[:, 0].min()) for intervals in claims.values() for interval in intervals if len(interval)]
  return claims, min([round(wall * 1e6), *starts]), round((wall + last - first) * 1e6)


def _claim(claims: _Claims, rank: str, start: np.ndarray | float, end: np.ndarray | float) -> None:
  """Adds [start, end) in microseconds: numbers, or arrays of many intervals."""
  whole = np.rint(np.stack([np.atleast_1d(np.minimum(start, end)), np.atleast_1d(end)], axis=1)).astype(np.int64)
  claims[rank].append(whole)


def _partition(claims: _Claims) -> dict[str, int]:
  """Microseconds of each bucket: every moment goes to the claim of highest precedence."""
  moments = np.unique(np.concatenate([interval.ravel() for intervals in claims.values() for interval in intervals]))
  lengths = np.diff(moments)
  free = np.ones(len(lengths), bool)
  micros = dict.fromkeys(BUCKETS, 0)
  for rank, bucket in _RANKS.items():
    if rank in claims:
      starts, ends = np.searchsorted(moments, np.concatenate(claims[rank])).T
      changes = np.bincount(starts, minlength=len(moments)) - np.bincount(ends, minlength=len(moments))
      active = np.cumsum(changes)[:-1] > 0
      micros[bucket] += int(lengths[active & free].sum())
      free &= ~active
  return micros


def _percent(micros: dict[str, int]) -> dict[str, float]:
  """Shares in hundredths of a percent that sum to exactly 100 (largest remainders get the missing hundredths)."""
  total = sum(micros.values())
  if total == 0:
    return {bucket: 100.0 if bucket == "other" else 0.0 for bucket in micros}
  floors = {bucket: value * 10000 // total for bucket, value in micros.items()}
  missing = 10000 - sum(floors.values())
  for bucket in sorted(micros, key=lambda b: micros[b] * 10000 % total, reverse=True)[:missing]:
    floors[bucket] += 1
  return {bucket: value / 100 for bucket, value in floors.items()}
