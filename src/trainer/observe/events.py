"""events.jsonl: what happened in a run, one JSON object per line. Goodput and the report are computed from it.

Every record has
  kind        one of the kinds below
  run         name of the run
  process     short random id of the process's life; changes when the job is restarted
  attempt     elastic attempt inside that process, from 1
  epoch       number of the epoch of the run's members, only where each slice is a JAX world of its own
  time        UTC, ISO 8601 with microseconds;   wall: the same moment in epoch seconds
  monotonic   seconds of the process's monotonic clock; differences inside one `process` are exact
A record is written at the end of what it describes; `seconds` is the duration, so it covers [monotonic - seconds,
monotonic]. Only time during which the training loop waited counts: work of a background thread has
`background=True`. Unknown kinds and fields are kept and ignored by readers.

Life of the process
  run_start     first record of a process: steps, num_slices, devices, devices_per_slice, platform, device_kind,
                global_batch_size, tokens_per_step, parameters, flops_per_token, vocab_size, unigram_entropy (nats per
                token or null), unigram_eval_loss (the same model's loss on the evaluation split, or null), config
                (flat dict), origins (dict: where each key was given; absent: default), data (dict: dataset,
                tokenizer, bos_token, eos_token, first_tokens, tokens, epochs), git_commit (or null), command, host,
                versions (dict)
  attempt_start attempt, step (completed so far), slices (ids alive)
  init_done     seconds (from the start of the process or of the attempt until the first step could be dispatched)
  compile       seconds, what (slices, evaluation or witness), cached (from the persistent cache), compilations,
                background
  attempt_end   of elastic runs: attempt, step (last completed), outcome ("complete", "slice_down", "slice_up",
                "preempted", "failed")
  run_end       exit (code)
Time spent
  restore           tier ("snapshot", "emergency", "persistent", "none"), step, seconds
  wait_slices       seconds, wanted, alive
  checkpoint_saved  step, tier, path, seconds (from the start of the save to its commit), blocking_seconds (of these, at
                    the beginning, the training loop waited)
  checkpoint_restored step, tier, path; checkpoint_rejected step, tier, reason (damaged: passed over)
  checkpoint_failed tier, reason, newest, newest_seconds: the storage failed at a save, and training goes on; the newest
                    step in storage and its age, if there is one
  snapshot          step, seconds, blocking_seconds, bytes
  eval              step, seconds, loss
  profile           seconds (for writing it), directory
  sample            step, seconds, prompt, text
  rehearsal_wait    step, seconds: a fault of fault_injection waited until the steps of other slices were prepared
Faults and recovery
  fault_injected slice, fault, step
  slice_down     step (last completed), slice (ids lost), slices (ids alive now), error, detect_seconds
  slice_up       step, slice (ids returned), slices
  member_failing member, host, error, times (in a row without progress of its own), pause_seconds (until it starts
                 again): the others go on, or wait
  member_slow    member, factor (its seconds for a share by the median of all; 1: no longer slow), since (step), shares
                 (that it has now), of (the shares of a slice), steps (of its replica, that it takes in a round of
                 local steps; 0: all)
  witness        outcome ("removed", "transient", "undecided"), round, members (whose sums of a share were not the
                 others'), where (dict: host and devices of each), agreed (dict: the last round without a difference),
                 arrays (dict: how many bits differ, at least)
  preemption     step (completed so far), signal
  primary        step, host, seconds (since this process had its last step or evaluation): this process writes the
                 records from here on; the primary before it is lost or has left
  hang           step, silent_seconds; of the watchdog, which then ends the process, also operation (or null)
  late_step      step, silent_seconds, operation (null): the watchdog has written the stacks, and still waits
  nonfinite      step, loss, grad_norm
  network        of slices as processes, at the end of an attempt: links (dict: a member on another host: the shortest
                 round trip in seconds, and bytes per second, of the connection to it, as the system has measured them)
  replicas_differ step, slice, array: no snapshot, because this slice has another copy of the array than the others
  recovery       once per slice_down or slice_up, when the first new step has completed, or no step is left:
                 event ("slice_down", "slice_up"), slice, step_before, step_after, steps_lost, tokens_lost,
                 slices_before, slices_after, detect_seconds, wait_seconds, restore_seconds, compile_seconds,
                 first_step_seconds, seconds (from fault to the first new step; an evaluation, save or witness before it
                 does not count, unless it fails), tier, compilations (in these seconds)
"""

from __future__ import annotations

import datetime
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from trainer.observe import files

EVENTS_FILE = "events.jsonl"
# Kinds that the next primary writes if the primary before it has died before it wrote them.
_REPLAYED_KINDS = frozenset({"slice_down", "slice_up", "recovery", "witness"})
_REMEMBERED = 64


class EventLog:
  """Writes events.jsonl; made once per process and passed around. Safe in threads; only the primary process writes."""

  def __init__(
    self,
    run_directory: str | None,
    run_name: str = "",
    *,
    is_primary: bool = True,
    wall: Callable[[], float] = time.time,
    monotonic: Callable[[], float] = time.monotonic,
  ) -> None:
    """run_directory: local or gs://; None: nothing is kept (`emit` still returns the record)."""
    self.run_directory = run_directory  # where every process reads
    self.directory = run_directory if is_primary else None  # where the primary writes; None in other processes
    self.run_name = run_name
    self.process = uuid.uuid4().hex[:8]
    self.attempt = 1
    self.epoch: int | None = None  # of the members, where each slice is a world of its own: a field of every record
    self._unwritten: deque[dict[str, Any]] = deque(maxlen=_REMEMBERED)
    self._clocks = (wall, monotonic)
    self._lines = files.open_lines(self.directory, EVENTS_FILE)
    self._lock = threading.Lock()
    self._listeners: list[Callable[[dict[str, Any]], None]] = []

  def begin_epoch(self, epoch: int) -> None:
    """The members of the run have changed: the number is a field of every record from now on."""
    self.epoch = epoch

  def subscribe(self, listener: Callable[[dict[str, Any]], None]) -> None:
    """`listener` gets every record that this process writes from now on, also the steps of metrics.jsonl. It must
    return at once, and may be called from any thread."""
    self._listeners.append(listener)

  def notify(self, record: dict[str, Any]) -> None:
    """Hands a record to the listeners, if this process writes the records."""
    for listener in self._listeners if self.directory is not None else ():
      listener(record)

  def stamp(self) -> dict[str, Any]:
    """Process, attempt and times: fields of every record of events.jsonl and metrics.jsonl."""
    wall, monotonic = (clock() for clock in self._clocks)
    return {"process": self.process, "attempt": self.attempt, "wall": wall, "monotonic": monotonic}

  def emit(self, kind: str, **fields: Any) -> dict[str, Any]:
    """Appends one record and returns it. `attempt_start` with attempt=n sets the attempt of this and later records."""
    with self._lock:
      if kind == "attempt_start":
        self.attempt = int(fields.get("attempt", self.attempt))
      stamp = self.stamp()
      time_utc = datetime.datetime.fromtimestamp(stamp["wall"], datetime.UTC).isoformat(timespec="microseconds")
      record = {"kind": kind, "run": self.run_name, "time": time_utc} | stamp | fields
      if self.epoch is not None:
        record["epoch"] = self.epoch
        if self.directory is None and kind in _REPLAYED_KINDS:
          self._unwritten.append(record)
      self._lines.append(files.dump_json(record))
      self.notify(record)
    return record

  def take_over(self, run_directory: str) -> None:
    """This process becomes the primary: it writes all records from now on. First it writes the losses and returns that
    the primary before it has not written."""
    last = files.known(lambda: _named(files.read_last_json_lines(run_directory, EVENTS_FILE)))
    known = {_identity(record) for record in last}
    with self._lock:
      self.directory, self._lines = run_directory, files.open_lines(run_directory, EVENTS_FILE)
      for record in self._unwritten:
        if _identity(record) not in known:
          self._lines.append(files.dump_json(record))
          self.notify(record)
      self._unwritten.clear()

  def hand_over(self) -> None:
    with self._lock:
      self._lines.close()
      self.directory = None

  def flush(self) -> None:
    self._lines.flush()

  def close(self) -> None:
    self._lines.close()


def _identity(record: dict[str, Any]) -> tuple[Any, ...]:
  """What is equal in the records that different processes make of the same event."""
  return record["kind"], record.get("event"), record.get("epoch"), str(record.get("slice"))


def read_events(run_directory: str) -> list[dict[str, Any]]:
  """All records of a run in the order in which they were written. Lines that a kill has cut short, or that another
  program has changed so that they name no kind of event, are skipped."""
  return list(_named(files.read_json_lines(run_directory, EVENTS_FILE)))


def _named(records: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
  return (record for record in records if isinstance(record.get("kind"), str))


def without_refused(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
  """Drops the records of processes that exited with 2 before their first step, unless there are no others."""
  ready = {event["process"] for event in events if event["kind"] == "init_done"}
  refused = {event["process"] for event in events if event["kind"] == "run_end" and event.get("exit") == 2} - ready
  return [event for event in events if event["process"] not in refused] or events
