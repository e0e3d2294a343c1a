"""services=goodput: the run's events for Google's ml-goodput-measurement, as MaxText records them.

The library keeps its records in Cloud Logging, in the log `goodput_{run_name}`. Without credentials they go to
{run}/goodput_records.jsonl, and the library's calculators read them from there:

  GoodputCalculator(job_name, "", cloud_logger=LocalRecords(run_directory, job_name)).get_job_goodput()

The library infers the end of a step from the start of the next one. So where a process ends, or slices change, the end
of the last step is recorded as the start of the step that would have followed. The library sees that this step is then
started a second time, and counts a disruption. What a process does after its last step, such as waiting for the commit
of a checkpoint, would count as part of this step. So it is recorded as badput.
"""

from __future__ import annotations

import datetime
import re
from typing import Any

from trainer.observe import files
from trainer.observe.log import Log

RECORDS_FILE = "goodput_records.jsonl"
_SHORTEST_DATA_WAIT = 1e-3  # seconds; shorter ones would triple the number of records and change nothing
# Event kind -> type of badput. The loop waited for all of `seconds`, or only for the first `blocking_seconds` of them.
_BADPUT = {"eval": "EVALUATION", "sample": "SAMPLE", "profile": "PROFILE", "rehearsal_wait": "REHEARSAL"}
_BLOCKING = {"checkpoint_saved": "CHECKPOINT_SAVE", "snapshot": "SNAPSHOT"}


def job_name(run_name: str) -> str:
  """The name of the run in the library, which uses it in names of logs and files."""
  return re.sub(r"[^\w.-]", "_", run_name, flags=re.ASCII)


class LocalRecords:
  """Stands for the library's connection to Cloud Logging: keeps the records in the run's folder."""

  def __init__(self, run_directory: str, job: str) -> None:
    self._directory, self._job = run_directory, job
    self._lines: files.LineFile | None = None  # opened at the first write: a reader changes nothing

  def write_cloud_logging_entry(self, entry: dict[str, Any] | None) -> None:
    if entry is not None:
      if self._lines is None:
        self._lines = files.open_lines(self._directory, RECORDS_FILE)
      self._lines.append(files.dump_json(entry))

  def read_cloud_logging_entries(
    self, start_time: Any = None, end_time: Any = None, last_entry_info: Any = None
  ) -> tuple[list[dict[str, Any]], tuple[datetime.datetime | None, str | None]]:
    """All records, or none where the caller has read them before (last_entry_info)."""
    entries = [] if last_entry_info else list(files.read_json_lines(self._directory, RECORDS_FILE))
    now = datetime.datetime.now(datetime.UTC)
    return [entry for entry in entries if entry.get("job_name") == self._job], (now, "")

  def flush(self) -> None:
    if self._lines is not None:
      self._lines.flush()


class GoodputRecording:
  """A Destination: translates the records of events.jsonl and metrics.jsonl into calls of the library."""

  def __init__(self, run_directory: str, run_name: str, log: Log) -> None:
    from google.auth.exceptions import DefaultCredentialsError
    from ml_goodput_measurement.src.goodput_elastic import ElasticGoodputRecorder

    job = job_name(run_name)
    try:
      self._recorder: Any = ElasticGoodputRecorder(job, f"goodput_{job}", logging_enabled=True)
      log.line(f"Goodput is recorded in Cloud Logging: goodput_{job}")
    except DefaultCredentialsError:
      local = LocalRecords(run_directory, job)
      self._recorder = ElasticGoodputRecorder(job, "", logging_enabled=True, cloud_logger=local)
      log.line(f"Goodput is recorded in {run_directory}/{RECORDS_FILE}: there are no credentials for Cloud Logging")
    self._total_slices = 1
    self._began: float | None = None  # wall time of run_start, until the first step can be dispatched
    self._waits_for: str | None = None  # "slice_down" or "scale_up", from the event to the next attempt or step
    self._changed = 0.0  # wall time of the last change of slices
    self._last: tuple[int, float] | None = None  # the last completed step, and when it ended
    self._badput_ended = 0.0  # wall time of the end of all badput so far

  def record(self, record: dict[str, Any]) -> None:
    """Takes the record of an event or of a completed step."""
    kind = record.get("kind")
    if kind is None:
      self._step(record)
    elif kind in _BADPUT:
      self._badput(_BADPUT[kind], record["wall"] - float(record.get("seconds") or 0.0), record["wall"])
    elif kind in _BLOCKING:
      began = record["wall"] - float(record.get("seconds") or 0.0)
      self._badput(_BLOCKING[kind], began, began + float(record.get("blocking_seconds") or 0.0))
    elif kind in ("run_start", "attempt_start", "init_done"):
      self._start(record)
    elif kind in ("slice_down", "slice_up"):
      self._change_of_slices(record)
    elif kind == "run_end":
      self._end(record)

  def flush(self) -> None:
    self._recorder.flush()

  def close(self, exit_code: int | None) -> None:
    self._recorder.flush()

  def _step(self, record: dict[str, Any]) -> None:
    began = record["wall"] - record["seconds"]
    if self._waits_for is not None:  # slices as processes: the attempt goes on, and the step's time includes the wait
      began = max(began, self._changed)
      self._recorder.record_elastic_wait_end_time(self._waits_for, _utc(began))
      self._waits_for = None
    self._recorder.record_step_start_time(record["step"], _utc(began))
    if record["data_wait"] >= _SHORTEST_DATA_WAIT:
      self._recorder.record_data_loading_start_time(_utc(began))
      self._recorder.record_data_loading_end_time(_utc(began + record["data_wait"]))
    self._last = record["step"], record["wall"]

  def _badput(self, kind: str, began: float, ended: float) -> None:
    if ended > began:
      self._recorder.record_custom_badput_event_start_time(_utc(began), kind)
      self._recorder.record_custom_badput_event_end_time(_utc(ended), kind)
      self._badput_ended = max(self._badput_ended, ended)

  def _start(self, record: dict[str, Any]) -> None:
    """A process or an attempt begins; or, with init_done, its first step can be dispatched."""
    now, recorder = record["wall"], self._recorder
    if record["kind"] == "run_start":
      self._total_slices, self._began = record["num_slices"], now
    elif record["kind"] == "attempt_start":
      alive = len(record["slices"])
      recorder.record_elastic_slice_counts(alive, self._total_slices, alive, _utc(now))
      if self._waits_for is not None:
        recorder.record_elastic_wait_end_time(self._waits_for, _utc(now))
        recorder.record_elastic_reinit_start_time(_utc(now))
    elif self._waits_for is not None:
      recorder.record_elastic_reinit_end_time(_utc(now))
      self._waits_for = None
    elif self._began is not None:
      began, self._began = self._began, None
      start = min(began, now - record["seconds"])  # of the process
      recorder.record_job_start_time(_utc(start))
      recorder.record_tpu_init_start_time(_utc(start))
      recorder.record_tpu_init_end_time(_utc(began))
      recorder.record_training_preparation_start_time(_utc(began))
      recorder.record_training_preparation_end_time(_utc(now))

  def _change_of_slices(self, record: dict[str, Any]) -> None:
    self._changed = record["wall"]
    if self._waits_for is None:
      self._waits_for = "slice_down" if record["kind"] == "slice_down" else "scale_up"
      began = record["wall"] if self._last is None else min(record["wall"], self._last[1])
      self._end_last_step(began)
      self._recorder.record_elastic_wait_start_time(self._waits_for, _utc(began))

  def _end_last_step(self, now: float) -> None:
    if self._last is not None:
      self._recorder.record_step_start_time(self._last[0] + 1, _utc(now))

  def _end(self, record: dict[str, Any]) -> None:
    if self._last is not None:
      self._badput("PROCESS_END", max(self._last[1], self._badput_ended), record["wall"])
    self._end_last_step(record["wall"])
    if record["exit"] == 0:
      self._recorder.record_job_end_time(_utc(record["wall"]))


def _utc(wall: float) -> datetime.datetime:
  return datetime.datetime.fromtimestamp(wall, datetime.UTC)
