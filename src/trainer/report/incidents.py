"""What happened in a run besides training, in sentences, with the cost of each event in seconds and tokens."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from trainer.config.errors import counted
from trainer.observe.metrics import format_duration
from trainer.report.history import RunHistory
from worlds.membership.messages import failing_line, slow_line
from worlds.membership.witness import alarm_line

# Tier of a recovery -> where the state came from.
_SOURCES = {
  "snapshot": "a snapshot in host memory",
  "emergency": "a copy on a local disk",
  "persistent": "the checkpoint in storage",
  "peer": "another slice",
}
# Parts of a recovery: field without `_seconds`, name.
_PARTS = {
  "detect": "detection",
  "wait": "waiting for slices",
  "restore": "restore",
  "compile": "compilation",
  "first_step": "first step",
}
# Exit code of a process -> why another one had to follow.
_ENDS = {
  0: "The run was complete, and newer checkpoints were taken away.",
  1: "The process before it had failed (exit code 1).",
  42: "The process before it was stopped by a signal and had saved its state (exit code 42).",
  130: "The process before it was stopped by Ctrl-C (exit code 130).",
}


@dataclasses.dataclass(frozen=True)
class Incident:
  """One event. A cost that does not apply, or is not known, is None."""

  wall: float  # epoch seconds of its record, which is written at the end of the event
  time: str  # the same, UTC
  step: int | None
  what: str
  why: str
  seconds: float | None = None  # during which no step that counts was completed
  tokens: int | None = None  # trained on again, or not used
  own_seconds: float | None = None  # the part of `seconds` that is not charged to an incident that began earlier


def find(run: RunHistory) -> list[Incident]:
  """The incidents of a run in order of time. A lost or returned slice has the costs in its recovery record."""
  found = [*_resizes(run), *_restarts(run), *_hangs(run), *_saves(run), *_others(run), *_failures(run)]
  return charge(sorted(found, key=lambda incident: incident.wall))


def charge(incidents: list[Incident]) -> list[Incident]:
  """The same incidents with own_seconds: time that several share belongs to the incident that began first. So their sum
  is the time in which at least one incident was under way."""
  charged, end = list(incidents), -np.inf
  began = {index: incident.wall - incident.seconds for index, incident in enumerate(incidents) if incident.seconds}
  for index in sorted(began, key=lambda index: (began[index], incidents[index].wall)):
    seconds = max(0.0, incidents[index].wall - max(began[index], end))
    charged[index] = dataclasses.replace(incidents[index], own_seconds=min(seconds, incidents[index].seconds or 0.0))
    end = max(end, incidents[index].wall)
  return charged


def failing(run: RunHistory) -> list[dict[str, Any]]:
  """The newest records of the members that fail again and again, and have not returned."""
  return list(_newest(run, "member_failing").values())


def incident_summary(run: RunHistory) -> list[str]:
  """Lines on the members that fail repeatedly, or are slower than the others, now."""
  slow = [event for event in _newest(run, "member_slow").values() if event["factor"] > 1]
  return [*map(failing_line, failing(run)), *map(slow_line, slow)]


def _newest(run: RunHistory, kind: str) -> dict[int, dict[str, Any]]:
  """{member: its newest record of this kind}, since the last launch and since its slice was lost or returned."""
  newest: dict[int, dict[str, Any]] = {}
  for event in run.of_kind(kind, "run_start", "slice_down", "slice_up"):
    if event["kind"] == kind:
      newest[event["member"]] = event
    elif event["kind"] == "run_start":
      newest.clear()
    else:
      for member in event["slice"] if isinstance(event.get("slice"), list) else ():
        newest.pop(member, None)
  return newest


def slices_lost(run: RunHistory) -> int:
  """How often a slice was lost; several that were lost together are as many losses."""
  return sum(map(slices_of, run.of_kind("slice_down")))


def slices_of(event: dict[str, Any]) -> int:
  """How many slices were lost, or have returned, in this event."""
  ids = event.get("slice")
  return len(ids) if isinstance(ids, list) else 1


def _resizes(run: RunHistory) -> Iterator[Incident]:
  """Lost and returned slices, each with the record of its recovery if the run came to it."""
  recoveries = run.of_kind("recovery")
  used: set[int] = set()
  for event in run.of_kind("slice_down", "slice_up"):
    match = next((i for i, done in enumerate(recoveries) if i not in used and _recovers(done, event)), None)
    if match is None:
      what = f"{_change(event)} The process ended before the next step."
      yield _incident(event, what, _sentence(event.get("error")))
      continue
    used.add(match)
    yield _resize(run, event, recoveries[match])


def _recovers(recovery: dict[str, Any], event: dict[str, Any]) -> bool:
  same = recovery.get("event") == event["kind"] and str(recovery.get("slice")) == str(event.get("slice"))
  return same and recovery.get("step_before") == event.get("step") and recovery["wall"] >= event["wall"] - 1


def _resize(run: RunHistory, event: dict[str, Any], recovery: dict[str, Any]) -> Incident:
  lost = int(recovery.get("steps_lost") or 0)
  after: Any = recovery.get("slices_after")
  what = f"{_change(event)} Training continued on {counted(after, 'slice')}"
  source = _SOURCES.get(str(recovery.get("tier")))
  what += f", from {source}." if source else "."
  if lost > 0 and recovery.get("step_after") is not None:
    first = int(recovery["step_after"]) + 1
    again = f"Step {first} was" if lost == 1 else f"Steps {first} to {first + lost - 1} were"
    what += f" {again} done again."
  return dataclasses.replace(
    _incident(event, what, " ".join(filter(None, (_sentence(event.get("error")), _parts(recovery))))),
    wall=recovery["wall"],
    seconds=recovery.get("seconds"),
    tokens=recovery.get("tokens_lost"),
  )


def _parts(recovery: dict[str, Any]) -> str:
  """`Compilation 20.6 s, restore 3.0 s.`: the parts that took a tenth of a recovery or more, the longest first."""
  total = float(recovery.get("seconds") or 0.0)
  took = [(float(recovery.get(f"{field}_seconds") or 0.0), name) for field, name in _PARTS.items()]
  long = [(seconds, name) for seconds, name in sorted(took, reverse=True) if seconds >= max(0.05, total / 10)]
  return _sentence(", ".join(f"{name} {seconds:.1f} s" for seconds, name in long))


def _restarts(run: RunHistory) -> Iterator[Incident]:
  """Processes that continued the run after another process had ended before all its steps were done."""
  tokens_per_step = int(run.start.get("tokens_per_step") or 0)
  starts = run.of_kind("run_start")
  for before, start in itertools.pairwise(starts):
    mine = run.rows["process"] == run.processes.index(before["process"])
    rows = run.rows[mine]
    records = [event for event in run.events if event["process"] == before["process"]]
    last = max([event["wall"] for event in records] + [float(row["wall"]) for row in rows[-1:]])
    ready = next((e for e in run.of_kind("init_done") if e["process"] == start["process"]), start)
    code = next((int(event["exit"]) for event in records if event["kind"] == "run_end"), None)
    again = _done_again(run, start)
    if code == 0 and not again:
      continue
    hung = any(event["kind"] == "hang" and "operation" in event for event in records)
    unknown = "The watchdog had stopped it (exit code 134)." if hung else "It ended without a record: it was killed."
    step = ready.get("step")
    what = "The process was started again" + ("." if step is None else f" and continued after step {step}.")
    if again:
      what += f" {counted(again, 'step')} done again."
    why = unknown if code is None else _ENDS.get(code, f"The process before it had ended with exit code {code}.")
    yield dataclasses.replace(
      _incident(ready, what, why),
      step=step,
      seconds=None if code == 0 else max(0.0, ready["wall"] - last),
      tokens=again * tokens_per_step if tokens_per_step else None,
    )


def _done_again(run: RunHistory, start: dict[str, Any]) -> int:
  """How many completed steps the process of `start` had to do again; 0 if it has not begun to."""
  steps, rows = run.rows["step"], np.flatnonzero(run.rows["process"] == run.processes.index(start["process"]))
  return max(0, int(steps[rows[0] - 1] - steps[rows[0]]) + 1) if rows.size and rows[0] else 0


def _hangs(run: RunHistory) -> Iterator[Incident]:
  """Processes that the watchdog ended. A slice that hangs is in the records of lost slices."""
  for event in run.of_kind("hang"):
    if "operation" not in event:
      continue
    silent = float(event.get("silent_seconds") or 0.0)
    ended = f"The watchdog ended the process after step {event.get('step')}."
    yield dataclasses.replace(
      _incident(event, ended, _sentence(f"{event['operation'] or 'the step'} did not finish")),
      seconds=silent,
    )


def _saves(run: RunHistory) -> Iterator[Incident]:
  """Checkpoints that were not usable, and snapshots that were refused."""
  for event in run.of_kind("checkpoint_rejected"):
    what = f"The {event.get('tier')} checkpoint of step {event.get('step')} was passed over."
    yield _incident(event, what, _sentence(event.get("reason")))
  for event in run.of_kind("checkpoint_failed"):
    good = ""
    if (newest := event.get("newest")) is not None:
      age = format_duration(float(event.get("newest_seconds") or 0.0))
      good = f" The newest checkpoint in storage was of step {newest}, from {age} before."
    yield _incident(event, f"A save in the {event.get('tier')} tier failed.", _sentence(event.get("reason")) + good)
  for event in run.of_kind("replicas_differ"):
    what = f"No snapshot of step {event.get('step')} was taken."
    yield _incident(event, what, f"{event.get('array')} of slice {event.get('slice')} differs from the other slices.")


def _others(run: RunHistory) -> Iterator[Incident]:
  tokens = run.start.get("tokens_per_step")
  for event in run.of_kind("nonfinite"):
    what = f"The update of step {event.get('step')} was not applied."
    why = f"Loss {event.get('loss')} and gradient norm {event.get('grad_norm')} are not both finite."
    yield dataclasses.replace(_incident(event, what, why), tokens=tokens)
  for event in run.of_kind("late_step"):
    what = f"The step after step {event.get('step')} was late. The stacks of all threads are in the log."
    yield _incident(event, what, f"It took more than {float(event.get('silent_seconds') or 0):.1f} s.")
  for event in run.of_kind("preemption"):
    what = f"The process was asked to stop, and stopped after step {event.get('step')}."
    yield _incident(event, what, f"{event.get('signal', 'SIGTERM')} was received.")
  for event in run.of_kind("primary"):
    what = f"Another process writes the records after step {event.get('step')}."
    yield _incident(event, what, "The process that wrote them before was lost or has left.")


def _failures(run: RunHistory) -> Iterator[Incident]:
  """Members that failed again and again while the others went on; those in a row are one incident."""
  last: dict[int, dict[str, Any]] = {}
  for event in run.of_kind("member_failing"):
    before = last.get(event["member"])
    if before is not None and event["times"] <= before["times"]:
      yield _failure(before)
    last[event["member"]] = event
  yield from map(_failure, last.values())
  for event in run.of_kind("member_slow"):
    yield _incident(event | {"step": event["since"]}, slow_line(event), "")
  for event in run.of_kind("witness"):
    yield _incident(event, alarm_line(event), "")


def _failure(event: dict[str, Any]) -> Incident:
  return _incident(event, failing_line(event), _sentence(event.get("error")))


def _incident(event: dict[str, Any], what: str, why: str) -> Incident:
  step = event.get("step")
  return Incident(event["wall"], str(event.get("time", "")), step if isinstance(step, int) else None, what, why)


def _change(event: dict[str, Any]) -> str:
  """`Slice 1 was lost after step 14.`, `Slices 0, 2 returned after step 25.`"""
  ids = event.get("slice")
  ids = ids if isinstance(ids, list) else [ids]
  who = f"Slice{'s' * (len(ids) != 1)} {', '.join(map(str, ids)) or '?'}"
  lost = "was lost" if len(ids) == 1 else "were lost"
  return f"{who} {lost if event['kind'] == 'slice_down' else 'returned'} after step {event.get('step')}."


def _sentence(text: Any) -> str:
  """`text` with a capital letter and a full stop; empty if there is none."""
  words = str(text or "").strip()
  return words and words[0].upper() + words[1:].rstrip(".") + "."
