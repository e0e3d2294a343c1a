"""Ends a hung process so that the scheduler can restart it: all stacks are written, then exit code 134."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

from trainer.observe.events import EventLog
from trainer.observe.log import Log

EXIT_CODE = 134  # 128 + SIGABRT, what schedulers show for an aborted process
LONG_OPERATION_FACTOR = 10  # a start, an evaluation or a save may take this many times the timeout of a step
_REPORT_SECONDS = 5.0


@dataclasses.dataclass(eq=False)
class _Operation:
  """A named operation under way, and the seconds for which the process has run since it began."""

  name: str
  seconds: float = 0.0


class Watchdog:
  """A thread that ends the process when no step completes within the timeout. One per process.

  A step: `timeout` seconds from a `beat` to the next `beat` or `rest`. A long operation: LONG_OPERATION_FACTOR times
  `timeout` inside `during`; the clock of the step stands still there.

  Time in which the whole process did not run (SIGSTOP, a suspended machine) does not count. For this reason the
  watchdog cannot see code that hangs while it holds the GIL; only a supervisor outside the process can.
  """

  def __init__(
    self,
    timeout: float,
    log: Log,
    events: EventLog,
    *,
    monotonic: Callable[[], float] = time.monotonic,
    end: Callable[[int], None] = os._exit,
  ) -> None:
    """timeout: seconds; 0 turns the watchdog off. `start` begins the watch."""
    self._timeout = timeout
    self._log, self._events = log, events
    self._monotonic, self._end = monotonic, end
    self._tick = min(1.0, timeout / 20)
    self._lock = threading.Lock()
    self._silent: float | None = None  # seconds since the last beat; None: no step is under way
    self._step: int | None = None
    self._operations: list[_Operation] = []
    self._stop = threading.Event()
    self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

  def start(self) -> None:
    """Starts the thread, unless the timeout is 0."""
    if self._timeout > 0:
      self._thread.start()

  def beat(self, step: int | None = None) -> None:
    """Restarts the clock of the step. step: the last completed step, for the report of a hang."""
    with self._lock:
      self._silent, self._step = 0.0, step

  def rest(self) -> None:
    """Stops the clock of the step until the next beat: the loop has ended. Waiting for slices has its own timeout."""
    with self._lock:
      self._silent = None

  @contextlib.contextmanager
  def during(self, name: str) -> Iterator[None]:
    """Allows the operation inside the block LONG_OPERATION_FACTOR x timeout seconds. Nests; each has its own clock.

    name: what a report calls it, such as "evaluation". The clock of the step restarts after the block.
    """
    operation = _Operation(name)
    with self._lock:
      self._operations.append(operation)
    try:
      yield
    finally:
      with self._lock:
        self._operations.remove(operation)
        if self._silent is not None:
          self._silent = 0.0

  @property
  def operation(self) -> str:
    """The name of the operation under way; "" if there is none."""
    with self._lock:
      return self._operations[-1].name if self._operations else ""

  def stop(self) -> None:
    """Ends the thread. Stopping twice, or before `start`, is allowed."""
    self._stop.set()
    if self._thread.is_alive():
      self._thread.join()

  def _run(self) -> None:
    before = self._monotonic()
    while not self._stop.wait(self._tick):
      now = self._monotonic()
      # If a tick took much longer than requested, the whole process stood still, not only the loop.
      hang = self._count(min(now - before, 2 * self._tick))
      before = now
      if hang is not None:
        self._abort(*hang)
        return

  def _count(self, seconds: float) -> tuple[float, str | None] | None:
    """Adds `seconds` to the clocks that run. Returns (seconds of silence, operation or None) of a hang, else None."""
    with self._lock:
      for operation in self._operations:
        operation.seconds += seconds
        if operation.seconds >= LONG_OPERATION_FACTOR * self._timeout:
          return operation.seconds, operation.name
      if not self._operations and self._silent is not None:
        self._silent += seconds
        if self._silent >= self._timeout:
          return self._silent, None
    return None

  def _abort(self, silent: float, operation: str | None) -> None:
    # The hung thread may hold the lock of stdout or of a file, so the report runs in a thread, with a time limit.
    report = threading.Thread(target=self._report, args=(silent, operation), name="watchdog report", daemon=True)
    report.start()
    report.join(_REPORT_SECONDS)
    self._end(EXIT_CODE)

  def _report(self, silent: float, operation: str | None) -> None:
    faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
    with tempfile.TemporaryFile() as file:  # faulthandler writes to a descriptor only
      faulthandler.dump_traceback(file=file, all_threads=True)
      file.seek(0)
      stacks = file.read().decode("utf-8", "replace")
    self._events.emit("hang", step=self._step, silent_seconds=silent, operation=operation)
    self._log.record(stacks)
    limit = f"watchdog_timeout_seconds={self._timeout:g}"
    if operation is None:
      what = f"no step completed for {silent:.0f} s ({limit})"
    else:
      what = f"{operation} has not finished in {silent:.0f} s ({LONG_OPERATION_FACTOR} x {limit})"
    self._log.warning(
      f"{what}, last completed step: {self._step}; stacks are on stderr and in the log; aborting with exit code "
      f"{EXIT_CODE}"
    )
    self._events.flush()
    self._log.flush()
