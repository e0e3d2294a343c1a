"""Goodput: where the wall time of a run went, in buckets that sum to 100 %, across restarts of the process.

Computed afterwards from events.jsonl and metrics.jsonl, so it costs the training nothing and can be repeated. Every
microsecond between the first and the last record belongs to exactly one bucket: the records claim intervals, and where
claims overlap (a compile inside a step) the bucket that comes first in BUCKETS wins. Google's ml-goodput-measurement
has the same categories; there they are added up separately, here they partition the time.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
from typing import Any

from trainer.observe import files
from trainer.observe.events import read_events, without_refused
from trainer.observe.log import Log
from trainer.observe.metrics import format_duration, read_records

GOODPUT_FILE = "goodput.json"

# Bucket -> what it holds, in order of precedence.
BUCKETS = {
  "compile": "XLA compilation in the foreground",
  "restore": "restoring state from any tier",
  "wait_slices": "waiting for slices to be there",
  "checkpoint": "saving checkpoints, as far as nothing else was done meanwhile",
  "snapshot": "copying state to host memory, the part that blocks the loop",
  "eval": "evaluation, and the sample at the end",
  "profile": "writing profiles",
  "steps_lost": "steps that had to be done again, and the time from the last good step until the fault was seen",
  "data_wait": "steps that waited for data",
  "steps": "steps that count: goodput",
  "init": "start of the process or attempt until its first step",
  "down": "no process was running",
  "other": "everything else",
}
# Claims in order of precedence, and the bucket of each. A checkpoint that is committed in the background costs only
# the time in which nothing else was done: the wait for it at the end of a run.
_BACKGROUND = "checkpoint in the background"
_RANKS = {name: name for name in BUCKETS if name not in ("down", "other")}
_RANKS |= {_BACKGROUND: "checkpoint", "down": "down", "other": "other"}

# Event kind -> bucket of the `seconds` before it, in which the loop stood still.
_TIMED = {
  "compile": "compile",
  "restore": "restore",
  "wait_slices": "wait_slices",
  "eval": "eval",
  "sample": "eval",
  "profile": "profile",
  "init_done": "init",
  "run_start": "init",
}
# The same where the loop stood still only for the first `blocking_seconds` of the `seconds`.
_BLOCKING = {"checkpoint_saved": "checkpoint", "snapshot": "snapshot"}


@dataclasses.dataclass(frozen=True)
class _Claim:
  """[start, end) in microseconds belongs to `rank` unless one of higher precedence claims it too."""

  start: int
  end: int
  rank: str


def compute(run_directory: str) -> dict[str, Any]:
  """Goodput of a run. ValueError if it has no records.

  Returns began (epoch seconds); wall_seconds; seconds and percent {bucket: value} with every bucket of BUCKETS,
  summing to wall_seconds and to 100 (percent in steps of 0.01, largest remainder); goodput_percent; steps (that
  count), steps_lost, processes, attempts; and slice_percent: slices alive, averaged over the time of the steps that
  count, of the slices of the run.
  """
  events, steps = without_refused(read_events(run_directory)), read_records(run_directory)
  if not events and not steps:
    raise ValueError(f"{run_directory}: no events.jsonl and no metrics.jsonl: not the directory of a run")
  lost = _mark_lost(steps)
  claims: list[_Claim] = []
  at = 0  # end of the previous life; lives never overlap, whatever the wall clock says
  begin: int | None = None
  lives = _lives(events, steps)
  for life in lives:
    found, first, last = _claims_of_life(life)
    shift = max(0, at - first) if begin is not None else 0
    if begin is None:
      begin = first
    elif first + shift > at:
      claims.append(_Claim(at, first + shift, "down"))
    claims.extend(_Claim(c.start + shift, c.end + shift, c.rank) for c in found)
    at = last + shift
  assert begin is not None
  claims.append(_Claim(begin, at, "other"))
  micros = _partition(claims)
  assert sum(micros.values()) == at - begin
  done = [s for s in steps if "loss" in s and not s["lost"]]
  total_slices = max((e.get("num_slices") or 0 for e in events if e["kind"] == "run_start"), default=0)
  step_time = sum(s["seconds"] for s in done)
  weighted = sum(s["seconds"] * s["slices"] for s in done)
  percent = _percent(micros)
  return {
    "began": begin / 1e6,
    "wall_seconds": (at - begin) / 1e6,
    "goodput_percent": percent["steps"],
    "percent": percent,
    "seconds": {bucket: value / 1e6 for bucket, value in micros.items()},
    "steps": len(done),
    "steps_lost": lost,
    "processes": len(lives),
    "attempts": sum(e["kind"] == "attempt_start" for e in events),
    "slice_percent": round(100 * weighted / (step_time * total_slices), 2) if step_time and total_slices else None,
  }


def write(run_directory: str, log: Log) -> dict[str, Any]:
  """Computes goodput, writes {run}/goodput.json and one log line, and returns it."""
  result = compute(run_directory)
  files.write_text(run_directory, GOODPUT_FILE, json.dumps(result, indent=2) + "\n")
  log.line(format_line(result))
  return result


def write_or_warn(run_directory: str, log: Log) -> None:
  """`write` at the end of a run. Whatever fails becomes a warning: the run is what counts."""
  try:
    write(run_directory, log)
  except Exception as error:  # noqa: BLE001 - a figure must not turn a complete run into a failed one
    log.warning(f"no goodput: {error!r}")


def format_line(result: dict[str, Any]) -> str:
  """`goodput: 91.20% of 0:02:03 (compile 5.10%, init 2.00%, ...), steps lost: 1` with the buckets that are not 0."""
  rest = sorted(((share, name) for name, share in result["percent"].items() if name != "steps" and share), reverse=True)
  detail = ", ".join(f"{name} {share:.2f}%" for share, name in rest)
  wall = format_duration(result["wall_seconds"])
  return f"goodput: {result['goodput_percent']:.2f}% of {wall} ({detail}), steps lost: {result['steps_lost']}"


def _mark_lost(steps: list[dict[str, Any]]) -> int:
  """Sets `lost` on every step record: the step, or one before it, was done again later. Returns how many are lost."""
  redone_from, lost = float("inf"), 0
  for record in reversed(steps):
    if "loss" in record:
      record["lost"] = record["step"] >= redone_from
      lost += record["lost"]
      redone_from = min(redone_from, record["step"])
  return lost


def _lives(events: list[dict[str, Any]], steps: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
  """Records of both files grouped by process, in time order; lives in the order in which they began."""
  lives: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
  for record in [*events, *steps]:
    lives[record["process"]].append(record)
  ordered = [sorted(life, key=lambda record: record["monotonic"]) for life in lives.values()]
  return sorted(ordered, key=lambda life: life[0]["wall"])


def _claims_of_life(life: list[dict[str, Any]]) -> tuple[list[_Claim], int, int]:
  """Claims of one process, and its first and last moment in microseconds of wall time.

  Inside a life only the monotonic clock counts; the wall clock merely places the life's first record.
  """
  wall, monotonic = life[0]["wall"], life[0]["monotonic"]
  claims: list[_Claim] = []
  last_step: int | None = None
  attempt_ended = -math.inf

  def claim(start: float, end: float, rank: str) -> None:
    claims.append(_Claim(min(round(start), round(end)), round(end), rank))

  for record in life:
    now = (wall + record["monotonic"] - monotonic) * 1e6
    kind = record.get("kind", "step" if "loss" in record else "")
    began = now - 1e6 * float(record.get("seconds") or 0.0)
    if kind == "step":
      claim(began, now, "steps_lost" if record["lost"] else "steps")
      claim(began, min(now, began + 1e6 * record["data_wait"]), "data_wait")
      last_step = round(now)
    elif kind in _BLOCKING:
      blocked = 1e6 * float(record.get("blocking_seconds") or 0.0)
      began = min(began, now - blocked)
      claim(began, began + blocked, _BLOCKING[kind])
      claim(began, now, _BACKGROUND)
    elif kind in _TIMED and not record.get("background"):
      claim(max(began, attempt_ended), now, _TIMED[kind])
    elif kind in ("slice_down", "hang") and last_step is not None:
      claim(last_step, now, "steps_lost")
      last_step = None
    elif kind == "attempt_end":
      attempt_ended = now  # what is timed after it cannot have begun before it
  end = round((wall + life[-1]["monotonic"] - monotonic) * 1e6)
  return claims, min([round(wall * 1e6), *(c.start for c in claims)]), end


def _partition(claims: list[_Claim]) -> dict[str, int]:
  """Microseconds of each bucket: every moment goes to the claim of highest precedence."""
  ranks = list(_RANKS)
  edges = [(c.start, 1, ranks.index(c.rank)) for c in claims] + [(c.end, -1, ranks.index(c.rank)) for c in claims]
  edges.sort()
  active, micros = [0] * len(ranks), dict.fromkeys(BUCKETS, 0)
  before = edges[0][0] if edges else 0
  for moment, change, rank in edges:
    if moment > before:
      first = next(i for i, count in enumerate(active) if count)
      micros[_RANKS[ranks[first]]] += moment - before
      before = moment
    active[rank] += change
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
