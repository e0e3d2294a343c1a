"""What every step prints and records: the log line, metrics.jsonl, TensorBoard, metrics objects."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from trainer.config.schema import ObserveSection
from trainer.observe import files
from trainer.observe.events import EventLog
from trainer.observe.log import Log

METRICS_FILE = "metrics.jsonl"
_LONGEST_FLUSH_SECONDS = 10.0  # limit of the time that a checkpoint waits for TensorBoard files
_HANDED_ON = 16  # records for a process that joins: more than can be unwritten
_REMEMBERED = 256  # records that a process can write in the place of a primary that is lost
_FLUSH_SECONDS = 10.0  # period of TensorBoard flushes: on an object store each one uploads the whole file

# StepRecord field -> TensorBoard tag
_TENSORBOARD = {
  "loss": "learning/loss",
  "z_loss": "learning/z_loss",
  "grad_norm": "learning/grad_norm",
  "lr": "learning/learning_rate",
  "tokens": "learning/tokens",
  "weights": "learning/loss_tokens",
  "seconds": "perf/step_seconds",
  "tflops_per_device": "perf/tflops_per_device",
  "tokens_per_second_per_device": "perf/tokens_per_second_per_device",
  "mfu": "perf/mfu",
  "data_wait": "perf/data_wait_seconds",
  "eta": "perf/eta_seconds",
  "slices": "elastic/slices",
}


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
  examples: dict[str, int] | None = None  # of the run so far, by source; None: no mixture, no field in the record
  slice_seconds: dict[str, float] | None = None  # {slice: seconds that it computed}, where slices are separate worlds


def format_step_line(record: StepRecord) -> str:
  """`completed step: 8, seconds: 0.159, TFLOP/s/device: 43.430, loss: 9.774, tokens/s/device: ...`, in fixed order."""
  mfu = "n/a" if record.mfu is None else f"{100 * record.mfu:.1f}%"
  return (
    f"completed step: {record.step}, seconds: {record.seconds:.3f}, TFLOP/s/device: {record.tflops_per_device:.3f}, "
    f"loss: {record.loss:.3f}, tokens/s/device: {record.tokens_per_second_per_device:.0f}, MFU: {mfu}, "
    f"lr: {record.lr:.2e}, grad_norm: {record.grad_norm:.3f}, tokens: {record.tokens}, slices: {record.slices}, "
    f"data_wait: {record.data_wait:.3f}, eta: {format_duration(record.eta)}"
  )


def format_elastic_line(step: int, down_event_count: int, good_slice_count: int) -> str:
  """The line of every step of an elastic run. Scripts read from it when the number of slices changed."""
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
  """One evaluation after `step`."""

  step: int
  eval_loss: float  # nats per weighted token; of the main set
  eval_seconds: float
  eval_losses: dict[str, float] | None = None  # of each set, if there are several


class Metrics:
  """Writes step records; made once per process. A step that is done again (resume, rewind) is written again."""

  def __init__(
    self, run_directory: str, cfg: ObserveSection, events: EventLog, log: Log, *, is_primary: bool = True
  ) -> None:
    """is_primary: whether this process writes; otherwise it only remembers its last records."""
    self._events = events
    self._cfg, self._log = cfg, log
    self._run_directory = run_directory
    self._last_evaluation: Evaluation | None = None  # by this process: an object store may not have the record yet
    self._recent: deque[StepRecord | Evaluation] = deque(maxlen=_REMEMBERED)
    self._open(is_primary)

  def _open(self, is_primary: bool) -> None:
    directory = self._run_directory
    self._lines = files.open_lines(directory if is_primary else None, METRICS_FILE)
    self._tensorboard: TensorBoard | None = None
    self._objects: MetricsObjects | None = None
    if is_primary and self._cfg.enable_tensorboard:
      self._tensorboard = TensorBoard(f"{directory}/tensorboard", self._events.process, self._log)
    if is_primary and self._cfg.gcs_metrics:
      self._objects = MetricsObjects(f"{directory}/metrics", self._cfg.log_period, self._log)

  def remembered(self) -> list[dict[str, Any]]:
    """The last records, as JSON: for a process that joins the run, and that may have to write them one day."""
    return [dataclasses.asdict(record) for record in list(self._recent)[-_HANDED_ON:]]

  def remember(self, records: list[dict[str, Any]]) -> None:
    """Takes in what another process has `remembered`."""
    self._recent.extend(Evaluation(**one) if "eval_loss" in one else StepRecord(**one) for one in records)

  @property
  def last_step(self) -> int:
    """The last step that this process has recorded or remembers; 0: none."""
    return max((record.step for record in self._recent if isinstance(record, StepRecord)), default=0)

  def take_over(self) -> list[StepRecord]:
    """This process is the primary from now on. Returns the steps that nobody had recorded, now recorded here."""
    known = list(files.read_last_json_lines(self._run_directory, METRICS_FILE))
    last = max((record["step"] for record in known if "loss" in record), default=0)
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
    return missing

  def hand_over(self) -> None:
    """Another process is the primary from now on."""
    self.close()
    self._open(False)

  def write(self, record: StepRecord) -> None:
    """Records one completed step. Does no I/O to object stores on the caller's thread."""
    self._recent.append(record)
    self._write(record)

  def _write(self, record: StepRecord) -> None:
    fields = dataclasses.asdict(record) | self._events.stamp()
    for optional in ("z_loss", "examples", "slice_seconds"):
      if fields[optional] is None:
        del fields[optional]
    line = files.dump_json(fields)
    self._lines.append(line)
    if self._tensorboard is not None:
      self._tensorboard.write(record.step, {tag: fields.get(key) for key, tag in _TENSORBOARD.items()}, fields["wall"])
    if self._objects is not None:
      self._objects.write(record.step, line)

  def write_eval(
    self, step: int, eval_loss: float, seconds: float = 0.0, losses: dict[str, float] | None = None
  ) -> None:
    """Records an evaluation after `step` (nats per weighted token). losses: of each set, if there are several."""
    evaluation = Evaluation(step, eval_loss, seconds, losses)
    self._recent.append(evaluation)
    self._write_eval(evaluation)

  def _write_eval(self, evaluation: Evaluation) -> None:
    fields = dataclasses.asdict(evaluation) | self._events.stamp()
    losses = fields["eval_losses"] or {}
    if not losses:
      del fields["eval_losses"]
    self._lines.append(files.dump_json(fields))
    self._last_evaluation = evaluation
    if self._tensorboard is not None:
      scalars = {f"evaluation/loss of {name}": loss for name, loss in losses.items()}
      self._tensorboard.write(evaluation.step, {"evaluation/loss": evaluation.eval_loss} | scalars, fields["wall"])

  def eval_loss(self, step: int) -> float | None:
    """The evaluation loss of the state after `step`, by this process or an earlier one; None: it is not recorded."""
    if self._last_evaluation is not None and step == self._last_evaluation.step:
      return self._last_evaluation.eval_loss
    return eval_loss(self._run_directory, step)

  def flush(self) -> None:
    """Writes pending records. Call before a checkpoint: a run that resumes from it does not write them again."""
    self._lines.flush()
    if self._tensorboard is not None:
      self._tensorboard.flush()

  def close(self) -> None:
    """Writes pending records and closes the files. Closing twice is allowed."""
    self._lines.close()
    if self._tensorboard is not None:
      self._tensorboard.close()
    if self._objects is not None:
      self._objects.close()
    self._tensorboard = self._objects = None


class TensorBoard:
  """TensorBoard event files. A step at or before the last one starts a new file that purges the steps it replaces.

  All work happens in a separate thread. It imports tensorboardX at the first record: the import takes seconds if torch
  is installed, and would delay the first step.
  """

  def __init__(self, directory: str, process: str, log: Log) -> None:
    self._directory, self._process, self._log = directory, process, log
    self._files = 0
    self._writer: Any = None
    self._last = -1
    self._flushed = float("-inf")
    self._failed = False
    self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tensorboard")

  def write(self, step: int, scalars: dict[str, float | None], wall: float) -> None:
    if not self._failed:
      self._submit(self._write, step, scalars, wall)

  def flush(self) -> None:
    """Returns when all records are written, or after _LONGEST_FLUSH_SECONDS: a slow disk must not stop a run."""
    wait([self._submit(self._flush)], _LONGEST_FLUSH_SECONDS)

  def close(self) -> None:
    self._submit(self._close_file)
    self._thread.shutdown(wait=True)

  def _submit(self, function: Callable[..., None], *args: Any) -> Future[None]:
    future = self._thread.submit(function, *args)
    future.add_done_callback(self._report)
    return future

  def _report(self, done: Future[None]) -> None:
    error = done.exception()
    if error is not None and not self._failed:
      self._failed = True
      self._log.warning(f"no TensorBoard files from here on: {error} (enable_tensorboard=false turns them off)")

  def _write(self, step: int, scalars: dict[str, float | None], wall: float) -> None:
    is_train = "learning/loss" in scalars
    if self._writer is None or (is_train and step <= self._last):
      self._open_file(step)
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.summary_pb2 import Summary

    values = [Summary.Value(tag=tag, simple_value=float(value)) for tag, value in scalars.items() if value is not None]
    self._writer.write_event(Event(wall_time=wall, step=step, summary=Summary(value=values)))
    if time.monotonic() - self._flushed > _FLUSH_SECONDS:
      self._flush()
    if is_train:
      self._last = step

  def _flush(self) -> None:
    if self._writer is not None:
      self._writer.flush()
    self._flushed = time.monotonic()

  def _open_file(self, step: int) -> None:
    # Not SummaryWriter: its thread ends when the disk is full, and closing it then waits for ever.
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event, SessionLog
    from tensorboardX.record_writer import directory_check

    self._close_file()
    directory_check(self._directory)
    # tensorboardX names files by the second: without a suffix, a quick rewind would overwrite the previous file.
    self._writer = EventsWriter(f"{self._directory}/events", f".{self._files:04d}.{self._process}")
    self._files += 1
    # Tells TensorBoard to drop this step and later steps of the previous files.
    self._writer.write_event(Event(wall_time=time.time(), step=step, session_log=SessionLog(status=SessionLog.START)))

  def _close_file(self) -> None:
    if self._writer is not None:
      writer, self._writer = self._writer, None
      writer.close()


class MetricsObjects:
  """One immutable object per `period` steps: {directory}/metrics_step_000001_to_step_000010.txt, JSON lines."""

  def __init__(self, directory: str, period: int, log: Log) -> None:
    self._directory, self._period, self._log = directory, period, log
    self._pending: list[tuple[int, str]] = []
    self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="metrics objects")

  def write(self, step: int, line: str) -> None:
    if self._pending and step != self._pending[-1][0] + 1:  # a rewind: the pending steps become their own object
      self._put()
    self._pending.append((step, line))
    if step % self._period == 0:
      self._put()

  def _put(self) -> None:
    if not self._pending:
      return
    first, last = self._pending[0][0], self._pending[-1][0]
    text = "".join(f"{line}\n" for _, line in self._pending)
    self._pending = []
    self._writer.submit(
      _put_object, self._directory, f"metrics_step_{first:06d}_to_step_{last:06d}", text
    ).add_done_callback(self._report)

  def _report(self, done: Future[None]) -> None:
    error = done.exception()
    if error is not None:
      self._log.warning(f"cannot write a metrics object under {self._directory}: {error}")

  def close(self) -> None:
    self._put()
    self._writer.shutdown(wait=True)


def _put_object(directory: str, stem: str, text: str) -> None:
  """Writes {stem}.txt, or {stem}.1.txt and so on where steps are done again: an object is never replaced."""
  from etils import epath

  root = epath.Path(directory)
  root.mkdir(parents=True, exist_ok=True)
  path, again = root / f"{stem}.txt", 0
  while path.exists():
    again += 1
    path = root / f"{stem}.{again}.txt"
  path.write_text(text)


def eval_loss(run_directory: str, step: int) -> float | None:
  """The loss if the newest record of `step` in metrics.jsonl is an evaluation, else None.

  If a step was done again after its evaluation, that evaluation belongs to a history that was given up.
  """
  newest: dict[str, Any] = {}
  for line in files.read_lines(run_directory, METRICS_FILE):
    if f'"step": {step},' in line:  # parse only the lines of this step: a long run has a million others
      with contextlib.suppress(json.JSONDecodeError):  # cut short by a kill
        newest = json.loads(line)
  return float(newest["eval_loss"]) if "eval_loss" in newest else None


def read_records(run_directory: str) -> list[dict[str, Any]]:
  """Every record of metrics.jsonl in the order in which it was written, steps that were done again included."""
  numeric = {field.name for field in dataclasses.fields(StepRecord)} | {"eval_loss"}
  records = []
  for record in files.read_json_lines(run_directory, METRICS_FILE):
    for key in numeric & record.keys():
      if isinstance(record[key], str):  # "nan", "inf"
        record[key] = float(record[key])
    records.append(record)
  return records


def given_up(steps: Sequence[float] | np.ndarray, completed: Sequence[bool] | np.ndarray) -> np.ndarray:
  """For each record in the order written: whether the run later went back and did the same or an earlier step again.

  completed: whether the record is one of a completed step; an evaluation replaces nothing. Takes linear time.
  """
  first_later = np.minimum.accumulate(np.where(completed, steps, np.inf)[::-1])[::-1]
  return np.asarray(steps) >= np.append(first_later[1:], np.inf)[: len(steps)]


def read_metrics(run_directory: str) -> list[dict[str, Any]]:
  """The run's history as it stands: one dict per step in order, each from the last time that the step was done.

  A step that is done again removes everything after it from the history. `eval_loss` is in the dict of the step after
  which it was measured.
  """
  records = read_records(run_directory)
  gone = given_up([record["step"] for record in records], ["loss" in record for record in records])
  history: dict[int, dict[str, Any]] = {}
  for record in itertools.compress(records, ~gone):
    step = record["step"]
    if "loss" in record:
      history[step] = record
    else:
      history.setdefault(step, {"step": step})["eval_loss"] = record["eval_loss"]
  return [history[step] for step in sorted(history)]
