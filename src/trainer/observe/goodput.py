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
from typing import Any

from trainer.observe import files
from trainer.observe.events import read_events
from trainer.observe.log import Log
from trainer.observe.metrics import format_duration, read_records

GOODPUT_FILE = "goodput.json"

# Bucket -> what it holds, in order of precedence.
BUCKETS = {
  "compile": "XLA compilation in the foreground",
  "restore": "restoring state from any tier",
  "wait_slices": "waiting for slices to be there",
  "checkpoint": "saving checkpoints, the part that blocks the loop",
  "snapshot": "copying state to host memory, the part that blocks the loop",
  "eval": "evaluation",
  "steps_lost": "steps that had to be done again, and the time from the last good step until the fault was seen",
  "data_wait": "steps that waited for data",
  "steps": "steps that count: goodput",
  "init": "start of the process or attempt until its first step",
  "down": "no process was running",
  "other": "everything else",
}
_ORDER = list(BUCKETS)

# Event kind -> (bucket, the field that says how long the loop stood still)
_TIMED = {
  "compile": ("compile", "seconds"),
  "restore": ("restore", "seconds"),
  "wait_slices": ("wait_slices", "seconds"),
  "checkpoint_save": ("checkpoint", "blocking_seconds"),
  "snapshot": ("snapshot", "blocking_seconds"),
  "eval": ("eval", "seconds"),
  "init_done": ("init", "seconds"),
  "run_start": ("init", "seconds"),
}


@dataclasses.dataclass(frozen=True)
class _Claim:
  """[start, end) in microseconds belongs to `bucket` unless a bucket of higher precedence claims it too."""

  start: int
  end: int
  bucket: str


def compute(run_directory: str) -> dict[str, Any]:
  """Goodput of a run. ValueError if it has no records.

  Returns wall_seconds; seconds and percent {bucket: value} with every bucket of BUCKETS, summing to wall_seconds
  and to 100 (percent in steps of 0.01, largest remainder); goodput_percent; steps (that count), steps_lost, processes,
  attempts; and slice_percent: slices alive, averaged over the time of the steps that count, of the slices of the run.
  """
  events, steps = read_events(run_directory), read_records(run_directory)
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
    claims.extend(_Claim(c.start + shift, c.end + shift, c.bucket) for c in found)
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

  def claim(end: int, seconds: float, bucket: str) -> None:
    claims.append(_Claim(end - max(0, round(seconds * 1e6)), end, bucket))

  for record in life:
    now = round((wall + record["monotonic"] - monotonic) * 1e6)
    if "loss" in record and "kind" not in record:
      claim(now, record["seconds"], "steps_lost" if record["lost"] else "steps")
      waited = min(record["data_wait"], record["seconds"])
      claim(now - round((record["seconds"] - waited) * 1e6), waited, "data_wait")
      last_step = now
    elif record.get("kind") in _TIMED and not record.get("background"):
      bucket, field = _TIMED[record["kind"]]
      claim(now, float(record.get(field) or 0.0), bucket)
    elif record.get("kind") in ("slice_down", "hang") and last_step is not None:
      claims.append(_Claim(last_step, now, "steps_lost"))
      last_step = None
  end = round((wall + life[-1]["monotonic"] - monotonic) * 1e6)
  return claims, min([round(wall * 1e6), *(c.start for c in claims)]), end


def _partition(claims: list[_Claim]) -> dict[str, int]:
  """Microseconds of each bucket: every moment goes to the claiming bucket of highest precedence."""
  edges = sorted(
    [(c.start, 1, _ORDER.index(c.bucket)) for c in claims] + [(c.end, -1, _ORDER.index(c.bucket)) for c in claims]
  )
  active, micros = [0] * len(_ORDER), [0] * len(_ORDER)
  before = edges[0][0] if edges else 0
  for moment, change, bucket in edges:
    if moment > before:
      micros[next(i for i, count in enumerate(active) if count)] += moment - before
      before = moment
    active[bucket] += change
  return dict(zip(_ORDER, micros, strict=True))


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
