"""What every step prints and records: its log line and metrics.jsonl, and where else its record goes."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

from trainer.observe import files
from trainer.observe.events import EventLog

METRICS_FILE = "metrics.jsonl"
_HANDED_ON = 16  # records for a process that joins: more than can be unwritten
_REMEMBERED = 256  # records that a process can write in the place of a primary that is lost


@dataclasses.dataclass(frozen=True)
class StepRecord:
  """One completed optimizer step. All numbers are host numbers (numpy and jax scalars are accepted)."""

  step: int  # optimizer steps completed with this one: the first is 1
  seconds: float  # wall time of the step, data wait included
  loss: float  # nats per weighted token of the global batch
  grad_norm: float  # global norm before clipping
  lr: float
  tokens: int  # of the run so far, this step included
  slices: int  # alive during the step
  weights: float = 0.0  # sum of the loss weights of the step: the tokens that counted
  data_wait: float = 0.0  # seconds the loop waited for the batch
  tflops_per_device: float = 0.0  # model TFLOP/s per living device
  tokens_per_second_per_device: float = 0.0
  mfu: float | None = None  # 0..1; None: no peak is known for the device
  eta: float = 0.0  # seconds until the last step
  skipped: bool = False  # non-finite: the update was not applied
  z_loss: float | None = None  # per weighted token, added to the loss; None: not used, no field in the record
  router_load_max: float | None = None  # tokens of the most used expert of any layer, relative to an even load, ...
  router_load_min: float | None = None  # ... tokens of the least used expert, ...
  router_entropy: float | None = None  # ... and the mean entropy of a layer, 1 if even; None: no experts, no fields
  examples: dict[str, int] | None = None  # of the run so far, by source; None: no mixture, no field in the record
  slice_seconds: dict[str, float] | None = None  # {slice: seconds of its data and computation}; None: one world
  replica_distance: float | None = None  # root mean square over replicas of their distance from the mean, ...
  outer_grad_norm: float | None = None  # ... norm of what they have moved on average, at the end of a round, ...
  bytes_sent: float | None = None  # ... and what this slice has sent in it; None: it is not the last step of a round
  ago: float = 0.0  # seconds: the steps of a round are recorded together, after the round; no field in the record
  proof: dict[str, Any] | None = None  # what a recorder gets and metrics.jsonl has not: see trust/receipt.py


# The fields of a record that are numbers, and their types as JSON has them.
_NUMBERS = {field.name for field in dataclasses.fields(StepRecord)} - {
  "examples",
  "slice_seconds",
  "ago",
  "proof",
} | {"eval_loss"}
# Without a value, a record has no such field.
_OPTIONAL = {field.name for field in dataclasses.fields(StepRecord) if field.default is None} - {"mfu", "proof"}
_PLAIN = {int, float, bool, type(None)}
_LARGEST = 1 << 63


def format_step_line(record: StepRecord) -> str:
  """The line of a step: the fields of the guides first, then what a person who waits wants to know."""
  router = "" if record.router_load_max is None else f", router_load_max: {record.router_load_max:.2f}"
  return (
    f"completed step: {record.step}, seconds: {record.seconds:.3f}, TFLOP/s/device: {record.tflops_per_device:.3f}, "
    f"loss: {record.loss:.3f}, grad_norm: {record.grad_norm:.3f}, slices: {record.slices}{router}, "
    f"eta: {format_duration(record.eta)}"
  )


def format_elastic_line(step: int, down_event_count: int, good_slice_count: int) -> str:
  """The line of the first step on a number of slices, in an elastic run. Scripts read from it when that changed."""
  return (
    f"step={step} elastic_manager.elastic_down_event_count={down_event_count} "
    f"elastic_manager.good_slice_count={good_slice_count}"
  )


def format_duration(seconds: float) -> str:
  """`0:01:02`; hours are not converted to days, so the text never contains a comma."""
  whole = max(0, round(seconds))
  return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


@dataclasses.dataclass(frozen=True)
class Evaluation:
  step: int
  eval_loss: float  # nats per weighted token; of the main set
  eval_seconds: float = 0.0
  eval_losses: dict[str, float] | None = None  # of each set, if there are several


class Recorder(Protocol):
  """Gets the records of metrics.jsonl too, one call at a time, perhaps from another thread. No call may raise an error,
  or wait, except as it says."""

  def write(self, fields: dict[str, Any], line: str) -> None:
    """fields: of the record of a completed step, which has a loss, or of an evaluation; line: the same as JSON, without
    `proof`."""

  def flush(self, *, wait: bool) -> None:
    """Makes all records so far safe. Returns when that is done, if wait and if nobody else could write them again."""

  def close(self, exit_code: int | None) -> None:
    """Begins to write what is left. exit_code: of the process; None: another process goes on, or it is not known."""

  def join(self) -> None:
    """Waits until everything is written, or gives up after some seconds."""


class Metrics:
  """Writes step records; made once per process. A step that is done again (resume, rewind) is written again."""

  def __init__(
    self,
    run_directory: str,
    events: EventLog,
    *,
    is_primary: bool = True,
    recorders: Callable[[], Sequence[Recorder]] = tuple,
    in_thread: bool = False,
    at_once: int = 1,
  ) -> None:
    """is_primary: whether this process writes; otherwise it only remembers its last records. recorders: opens those
    who get the records too, when this process begins to write. in_thread: a thread writes the records of steps, see
    `flush_pending`. at_once: the most steps that are recorded together."""
    self._events, self._recorders, self._in_thread = events, recorders, in_thread
    self._pending: Future[None] | None = None  # the last record of a step that the thread writes
    self._run_directory = run_directory
    self._last_evaluation: Evaluation | None = None  # by this process: an object store may not have the record yet
    self._handed_on = _HANDED_ON + at_once - 1
    self._recent: deque[StepRecord | Evaluation] = deque(maxlen=_REMEMBERED + at_once - 1)
    self._recent_at = float(events.stamp()["monotonic"])  # when the newest of these was made
    self.callbacks: list[Callable[[StepRecord], object]] = []
    """Called with each record that `write` gets, after it is written. Their errors are raised there."""
    self._before = _last_step_record(self._last_records())  # perhaps of a launch that was ahead of this one
    self._open(is_primary)

  def _open(self, is_primary: bool) -> None:
    self._lines = files.open_lines(self._run_directory if is_primary else None, METRICS_FILE)
    self._writers = list(self._recorders()) if is_primary else []
    self._thread = ThreadPoolExecutor(1, "records") if is_primary and self._in_thread else None

  def remembered(self) -> list[dict[str, Any]]:
    """The last records, as JSON: for a process that joins the run, and that may have to write them one day."""
    return [dataclasses.asdict(record) for record in list(self._recent)[-self._handed_on :]]

  def remember(self, records: list[dict[str, Any]]) -> None:
    """Takes in what another process has `remembered`."""
    self._recent_at = float(self._events.stamp()["monotonic"])
    self._recent.extend(Evaluation(**one) if "eval_loss" in one else StepRecord(**one) for one in records)

  def _remember(self, record: StepRecord | Evaluation) -> None:
    self._recent.append(record)
    self._recent_at = float(self._events.stamp()["monotonic"])

  @property
  def last_step(self) -> int:
    """The last step that this process has recorded or remembers; 0: none."""
    return max((record.step for record in self._recent if isinstance(record, StepRecord)), default=0)

  @property
  def earlier_step(self) -> int:
    """The last step that earlier processes have recorded; 0: none."""
    return int(self._before.get("step", 0))

  @property
  def seconds_since_last_record(self) -> float:
    """How long ago this process last had a record, by its own clock."""
    return float(self._events.stamp()["monotonic"] - self._recent_at)

  def recorded_step(self) -> int:
    """The step that was recorded last, by any process, since this process began; 0: none."""
    last = _last_step_record(self._last_records())
    return 0 if last == self._before else int(last.get("step", 0))

  def _last_records(self) -> list[dict[str, Any]]:
    return current_records(list(valid_records(files.read_last_json_lines(self._run_directory, METRICS_FILE))))

  def take_over(self) -> list[StepRecord]:
    """This process is the primary from now on. Returns the steps that nobody had recorded, now recorded here."""
    known = files.known(self._last_records)
    last = _last_step_record(known).get("step", 0)
    evaluated = {record["step"] for record in known if "eval_loss" in record}
    self._open(True)
    missing: list[StepRecord] = []
    for record in list(self._recent):
      if not isinstance(record, StepRecord):
        if record.step >= last and record.step not in evaluated:
          self._write_eval(record)
      elif record.step > last:
        self._write(record)
        missing.append(record)
    self.flush_pending()
    return missing

  def hand_over(self) -> None:
    """Another process is the primary from now on."""
    self.close(None)
    self._open(False)

  def write(self, record: StepRecord) -> None:
    """Records one completed step. Does no I/O to object stores on the caller's thread."""
    self._remember(record)
    self._write(record)
    if self.callbacks:
      self.flush_pending()
    for callback in self.callbacks:
      callback(record)

  def flush_pending(self) -> None:
    """Returns when the thread has written all records. Call it before another process may become the primary: that
    one writes what is missing in the files."""
    if self._pending is not None:
      pending, self._pending = self._pending, None
      pending.result()

  def _write(self, record: StepRecord) -> None:
    fields = vars(record) | self._events.stamp()  # a deep copy would take longer than everything else here
    ago = fields.pop("ago")
    fields |= {name: fields[name] - ago for name in ("wall", "monotonic")}
    for optional in _OPTIONAL:
      if fields[optional] is None:
        del fields[optional]
    self.flush_pending()
    if self._thread is None:
      self._put(fields)
    else:
      self._pending = self._thread.submit(self._put, fields)

  def _put(self, fields: dict[str, Any]) -> None:
    proof = {"proof": fields.pop("proof")}
    line = files.dump_json(fields)
    # First: after a kill, the next primary writes what metrics.jsonl does not have.
    for writer in self._writers:
      writer.write(fields | proof, line)
    self._lines.append(line)
    self._events.notify(fields)

  def write_eval(self, evaluation: Evaluation) -> None:
    self._remember(evaluation)
    self._write_eval(evaluation)

  def _write_eval(self, evaluation: Evaluation) -> None:
    self.flush_pending()
    fields = dataclasses.asdict(evaluation) | self._events.stamp()
    if not fields["eval_losses"]:
      del fields["eval_losses"]
    line = files.dump_json(fields)
    self._lines.append(line)
    self._last_evaluation = evaluation
    for writer in self._writers:
      writer.write(fields, line)

  def eval_loss(self, step: int, sets: Collection[str], main: str) -> float | None:
    """The loss on the set `main` of the state after `step`, by this process or an earlier one.

    None: the losses of all `sets` are not recorded.
    """
    if self._last_evaluation is not None and step == self._last_evaluation.step:
      return self._last_evaluation.eval_loss
    return eval_loss(self._run_directory, step, sets, main)

  def flush(self, *, wait: bool = True) -> None:
    """Writes pending records. Call before a checkpoint: a run that resumes from it does not write them again.

    wait: False before the last save of a process: a writer may not delay it, and `close` waits for all of them."""
    self.flush_pending()
    self._lines.flush()
    for writer in self._writers:
      writer.flush(wait=wait)

  def close(self, exit_code: int | None = None) -> None:
    """Writes pending records and closes the files. Closing twice is allowed.

    exit_code: of the process, for services; None: another process goes on, or the code is not known.
    """
    self.flush_pending()
    if self._thread is not None:
      self._thread.shutdown()
      self._thread = None
    self._lines.close()
    for writer in self._writers:
      writer.close(exit_code)
    for writer in self._writers:
      writer.join()
    self._writers = []


def _last_step_record(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
  return next((record for record in reversed(records) if "loss" in record), {})


def eval_loss(run_directory: str, step: int, sets: Collection[str], main: str) -> float | None:
  """The loss on `main` if the newest record of `step` in metrics.jsonl is an evaluation of all `sets`, else None.

  If a step was done again after its evaluation, that evaluation belongs to a history that was given up.
  """
  newest: dict[str, Any] = {}
  for line in files.read_lines(run_directory, METRICS_FILE):
    if f'"step": {step},' in line:  # parse only the lines of this step: a long run has a million others
      with contextlib.suppress(json.JSONDecodeError):  # cut short by a kill
        value = json.loads(line)
        newest = value if isinstance(value, dict) else newest
  # A record of a single set does not name it.
  losses = newest.get("eval_losses", {main: newest["eval_loss"]} if "eval_loss" in newest else {})
  complete = isinstance(losses, dict) and losses.keys() >= set(sets)
  return number(losses[main]) if complete else None


def number(value: Any) -> float | None:
  """A number of a record, which may be the text "nan" or "inf"; None for everything else."""
  with contextlib.suppress(TypeError, ValueError, OverflowError):
    return float(value)
  return None


def read_records(run_directory: str) -> list[dict[str, Any]]:
  """Every record of metrics.jsonl in the order in which it was written, steps that were done again included."""
  return list(valid_records(files.read_json_lines(run_directory, METRICS_FILE)))


def valid_records(records: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
  """Yields the records with a step. What another program has changed is left out: records without one, wrong values."""
  for record in records:
    if not isinstance(record.get("step"), int) or not _is_plain(record["step"]):
      continue
    if not all(map(_is_plain, map(record.get, _NUMBERS))):
      for name in _NUMBERS & record.keys():
        if type(record[name]) is str:  # "nan", "inf"
          record[name] = number(record[name])
        if not _is_plain(record[name]):
          del record[name]
    yield record


def _is_plain(value: Any) -> bool:
  """Whether a value is a number that a record may have, or None."""
  kind = type(value)
  return kind in _PLAIN and (kind is not int or -_LARGEST < value < _LARGEST)


def given_up(steps: Sequence[float] | np.ndarray, completed: Sequence[bool] | np.ndarray) -> np.ndarray:
  """For each record in the order written: whether the run later went back and did the same or an earlier step again.

  completed: whether the record is one of a completed step; an evaluation replaces nothing. Takes linear time.
  """
  first_later = np.minimum.accumulate(np.where(completed, steps, np.inf)[::-1])[::-1]
  return np.asarray(steps) >= np.append(first_later[1:], np.inf)[: len(steps)]


def current_records(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
  """The records that count: without records that were given up."""
  gone = given_up([record["step"] for record in records], ["loss" in record for record in records])
  return list(itertools.compress(records, ~gone))


def read_metrics(run_directory: str) -> list[dict[str, Any]]:
  """The run's history as it stands: one dict per step in order, each from the last time that the step was done.

  A step that is done again removes everything after it from the history. `eval_loss` (and `eval_losses`, see
  Evaluation) is in the dict of the step after which it was measured.
  """
  history: dict[int, dict[str, Any]] = {}
  for record in current_records(read_records(run_directory)):
    step = record["step"]
    if "loss" in record:
      history[step] = record
    else:
      evaluation: dict[str, Any] = {key: record[key] for key in ("eval_loss", "eval_losses") if key in record}
      history.setdefault(step, {"step": step}).update(evaluation)
  return [history[step] for step in sorted(history)]


def read_losses(run_directory: str) -> dict[int, float]:
  """{completed step: its training loss} of the run's history as it stands."""
  return {int(record["step"]): float(record["loss"]) for record in read_metrics(run_directory) if "loss" in record}
