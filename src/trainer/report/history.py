"""A run read back from its files, once, for goodput, plots and the report page."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from trainer.config.errors import ConfigError
from trainer.observe import files
from trainer.observe.events import read_events, without_refused
from trainer.observe.metrics import METRICS_FILE, given_up, valid_records

Events = list[dict[str, Any]]

_LAST_STEPS = 20
_LONGEST = 1e10  # seconds: 317 years. A longer duration, or a later time, is no value of the trainer
_CLOCKS_DIFFER = 5.0  # seconds between the clocks of two hosts that no good clock has

# A record of metrics.jsonl as a row of numbers. A number that the record lacks is nan.
_NUMBERS = (
  *("step", "seconds", "loss", "eval_loss", "grad_norm", "lr", "tokens", "slices", "data_wait", "mfu"),
  *("wall", "monotonic", "router_load_max", "router_load_min", "router_entropy"),
)
_ROW = np.dtype(
  [
    *((name, np.float64) for name in _NUMBERS),
    ("process", np.int32),  # index into RunHistory.processes
    ("completed", np.bool_),  # the record of a completed step, not of an evaluation
  ]
)

# The types of the fields of events that the report computes with or looks into, besides seconds and *_seconds. All
# others it only shows.
_NUMBER, _DICT, _TEXT = int | float | None, dict | None, str | None
_TYPES: dict[str, Any] = {
  **dict.fromkeys(("devices", "num_slices", "parameters", "slices_after", "vocab_size"), _NUMBER),
  **dict.fromkeys(("step", "step_after", "step_before", "steps", "steps_lost", "tokens_lost"), _NUMBER),
  **dict.fromkeys(("tokens_per_step", "unigram_entropy", "unigram_eval_loss"), _NUMBER),
  **dict.fromkeys(("config", "data", "origins", "versions"), _DICT),
  **dict.fromkeys(("command", "device_kind", "error", "git_commit", "host", "platform", "reason", "tier"), _TEXT),
  "time": _TEXT,
}


@dataclasses.dataclass(frozen=True)
class RunHistory:
  """The records of a run directory. Arrays of rows have the fields of _ROW: rows["loss"] is a column."""

  directory: str
  name: str
  processes: list[str]  # ids, in the order in which their first records were written
  rows: np.ndarray  # every step record in the order written, steps that were done again included
  redone: np.ndarray  # for each of `rows`: whether the step, or one before it, was done again later
  evals: np.ndarray  # rows of the evaluations that count, in order
  eval_sets: dict[str, np.ndarray]  # by name, if there are several sets: their losses, one for each of `evals`
  events: Events  # of the processes that were not refused
  last_wall: float  # the time of the newest record, by the clock of its host
  start: dict[str, Any]  # the newest run_start of these, {} if there is none

  @functools.cached_property
  def steps(self) -> np.ndarray:
    """The history as it stands: one row per step, in order."""
    return self.rows[~self.redone]

  @functools.cached_property
  def lost(self) -> np.ndarray:
    """Rows of steps that were done again later."""
    return self.rows[self.redone]

  @property
  def has_experts(self) -> bool:
    return bool(np.isfinite(self.steps["router_load_max"]).any())

  @property
  def total_slices(self) -> int:
    most = int(self.rows["slices"].max()) if len(self.rows) else 0
    return max(int(self.start.get("num_slices") or 0), most)

  @property
  def end(self) -> dict[str, Any] | None:
    """The newest run_end; None if a process has written the records since: the run goes on, or was killed."""
    for event in reversed(self.events):
      if event["kind"] in ("run_end", "run_start", "primary"):
        return event if event["kind"] == "run_end" else None
    return None

  def of_kind(self, *kinds: str) -> Events:
    return [event for event in self.events if event["kind"] in kinds]

  def progress(self) -> str:
    """`15 of 40`: the last step and the wanted steps; `80 (40 wanted)` after a start with fewer steps."""
    done, wanted = int(self.steps["step"][-1]), int(self.start.get("steps") or 0)
    return f"{done:,}" + (f" of {wanted:,}" if wanted >= done else f" ({wanted:,} wanted)" if wanted else "")

  def require_steps(self) -> None:
    """ConfigError if no step was completed yet."""
    if len(self.steps):
      return
    if self.end is not None:
      raise ConfigError(
        f"{self.directory}: the run ended with exit code {self.end.get('exit')} before its first step. "
        "log.txt there says why"
      )
    raise ConfigError(f"{self.directory}: no completed step in {METRICS_FILE} yet. Try again after the first step")

  def last_loss(self) -> tuple[float, str]:
    """The training loss at the end of `steps`, and in words what it is: a mean of the finite losses.

    The last step of a short run, whose loss still falls so fast that a mean would hide it.
    """
    losses = self.steps["loss"][-_LAST_STEPS:]
    finite = losses[np.isfinite(losses)]
    if len(self.steps) < 2 * _LAST_STEPS or not len(finite):
      return float(losses[-1]), "last step"
    return float(np.mean(finite)), f"mean of last {_LAST_STEPS} steps"

  def tokens_per_second(self) -> np.ndarray:
    """Of the whole cluster, for each row of `steps`: the step's tokens by its seconds (nan where unknown)."""
    steps = self.steps
    if self.start.get("tokens_per_step"):
      tokens = np.full(len(steps), float(self.start["tokens_per_step"]))
    else:
      tokens = np.diff(steps["tokens"], prepend=np.nan)
      tokens[np.diff(steps["step"], prepend=np.nan) != 1] = np.nan
    return np.divide(tokens, steps["seconds"], out=np.full(len(steps), np.nan), where=steps["seconds"] > 0)


def load(run_directory: str) -> RunHistory:
  """Reads a run directory, local or gs://. ConfigError if it holds no records of a run."""
  files.check_address(run_directory)
  events = without_refused(clean_events(read_events(run_directory)))
  processes = {process: index for index, process in enumerate(dict.fromkeys(event["process"] for event in events))}
  losses: list[dict[str, float]] = []
  records = np.fromiter(_rows(run_directory, processes, losses), _ROW)
  if not events and not len(records):
    raise ConfigError(_not_a_run(run_directory))
  shift = _use_one_clock(events, records, processes)
  completed, redone = records["completed"], given_up(records["step"], records["completed"])
  starts = [event for event in events if event["kind"] == "run_start"]
  return RunHistory(
    directory=run_directory,
    name=str(starts[-1]["run"]) if starts and starts[-1].get("run") else run_directory.rstrip("/").split("/")[-1],
    processes=list(processes),
    rows=records[completed],
    redone=redone[completed],
    evals=records[~completed & ~redone],
    eval_sets=_by_name(list(itertools.compress(losses, ~redone[~completed]))),
    events=events,
    last_wall=max([*records["wall"], *(event["wall"] for event in events)]) - shift,
    start=starts[-1] if starts else {},
  )


def _use_one_clock(events: Events, records: np.ndarray, processes: dict[str, int]) -> float:
  """Moves the wall times of a process whose host has another clock than the host of the process before it. Returns by
  how much the times of the last process were moved.

  That is known where a process takes the records over, because it says how long it had waited for them, and where a
  process would have begun before the process before it had ended. A process that took them over twice is left alone.
  """
  of_process: dict[str, Events] = {process: [] for process in processes}
  for event in events:
    of_process[event["process"]].append(event)
  if len(list(itertools.groupby(event["process"] for event in events))) > len(processes):
    return 0.0
  end, shift = -math.inf, 0.0
  for process, index in processes.items():
    mine, rows = of_process[process], records["process"] == index
    walls = [*records["wall"][rows], *(event["wall"] for event in mine)]
    begins = next((event for event in mine if event["kind"] in ("run_start", "primary")), {})
    shift = max(0.0, end - min(walls))
    if begins.get("kind") == "primary" and begins.get("seconds") is not None:
      shift = end + begins["seconds"] - begins["wall"]
    if math.isinf(end) or abs(shift) <= _CLOCKS_DIFFER:
      shift = 0.0
    records["wall"][rows] += shift
    for event in mine:
      event["wall"] += shift
    end = max(end, max(walls) + shift)
  return shift


def load_with_steps(run_directory: str) -> RunHistory:
  """Like `load`; ConfigError also if no step was completed yet."""
  run = load(run_directory)
  run.require_steps()
  return run


def _not_a_run(run_directory: str) -> str:
  if not files.exists(run_directory):
    return f"{run_directory} does not exist. Give the folder of a run: base_output_directory/run_name"
  return (
    f"{run_directory} is not the folder of a run: it has no {METRICS_FILE} and no events.jsonl. "
    "Give base_output_directory/run_name"
  )


def _is_record(record: dict[str, Any]) -> bool:
  return _are_times(record, ("wall", "monotonic")) and isinstance(record.get("process"), str)


def _are_times(record: dict[str, Any], names: Sequence[str]) -> bool:
  """Whether these fields of a record are seconds that can be."""
  return _are_finite(record, names) and all(0 <= record[name] <= _LONGEST for name in names)


def _are_finite(record: dict[str, Any], names: Sequence[str]) -> bool:
  try:
    return all(map(math.isfinite, map(record.__getitem__, names)))
  except (KeyError, TypeError, OverflowError):
    return False


def clean_events(records: Iterable[dict[str, Any]]) -> Events:
  """The records of events, without those and without the fields that another program has changed."""
  return [_cleaned(event) for event in records if _is_event(event)]


def _is_event(record: dict[str, Any]) -> bool:
  """Whether a record has what every event has, a run_end its exit code, and one of a member what is said of it."""
  if record.get("kind") == "member_failing":
    fine = isinstance(record.get("host"), str) and _are_finite(record, ("member", "times", "pause_seconds"))
  elif record.get("kind") == "member_slow":
    fine = _are_finite(record, ("member", "factor", "since", "shares", "of", "steps"))
  elif record.get("kind") == "witness":
    dicts = all(isinstance(record.get(name), dict) for name in ("where", "agreed", "arrays"))
    fine = dicts and all(isinstance(record.get(name), str) for name in ("outcome", "round"))
    fine = fine and isinstance(record.get("members"), list)
  else:
    fine = record.get("kind") != "run_end" or isinstance(record.get("exit"), int)
  return fine and isinstance(record.get("kind"), str) and _is_record(record)


def _cleaned(event: dict[str, Any]) -> dict[str, Any]:
  """The event without the fields whose values have another type than the trainer writes, or are not finite."""
  return {name: value for name, value in event.items() if _fits(name, value)}


def _fits(name: str, value: Any) -> bool:
  if name.endswith("seconds"):
    return value is None or _are_times({name: value}, (name,))
  if name not in _TYPES:
    return True
  return isinstance(value, _TYPES[name]) and (not isinstance(value, int | float) or _are_finite({name: value}, (name,)))


def _rows(run_directory: str, processes: dict[str, int], losses: list[dict[str, float]]) -> Iterator[tuple[Any, ...]]:
  """Records of metrics.jsonl as values of _ROW, one at a time.

  Adds new processes to `processes`, and the losses of each evaluation by set to `losses`.
  """
  for record in valid_records(files.read_json_lines(run_directory, METRICS_FILE)):
    is_step = "loss" in record
    if not _is_record(record) or (
      is_step and not (_are_times(record, ("seconds",)) and _are_finite(record, ("slices",)))
    ):
      continue  # damaged: a line that a program other than the trainer has changed
    process = processes.setdefault(record["process"], len(processes))
    if not is_step:
      sets = record.get("eval_losses")
      sets = sets if isinstance(sets, dict) else {}
      losses.append({name: loss for name, loss in sets.items() if isinstance(loss, int | float)})
    yield (*map(record.get, _NUMBERS), process, is_step)


def _by_name(values: Sequence[dict[str, float]]) -> dict[str, np.ndarray]:
  """{name: values of all evaluations}; nan where an evaluation has no such value."""
  names = dict.fromkeys(name for one in values for name in one)
  return {name: np.array([one.get(name, np.nan) for one in values], np.float64) for name in names}
