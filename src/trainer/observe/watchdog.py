"""Notices late steps and writes all stacks; ends a hung process with exit code 134, so that a scheduler restarts it."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import math
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from trainer.observe.events import EventLog
from trainer.observe.log import Log
from worlds.exit_codes import HUNG

LONG_OPERATION_FACTOR = 10  # a start, an evaluation or a save may take this many times the timeout of a step
_LEAST_OPERATION_SECONDS = 1800.0  # a long operation may take this long after `Watchdog.set_timeout`
_REPORT_SECONDS = 5.0

# A step is late after max(LATE_SECONDS, LATE_FACTOR x the 99th percentile of the last _STEPS steps), once the attempt
# has done _FEWEST steps.
LATE_SECONDS, LATE_FACTOR = 5.0, 3.0
_STEPS, _FEWEST = 200, 20
_NOTICE_SECONDS = 600.0  # between two reports of late steps: a slow disk must not fill the log with stacks
ADAPTIVE = -1.0  # a timeout: a late step is a hang
_ADAPTIVE_TIMEOUT = 60.0  # before enough steps are known, and for long operations


@dataclasses.dataclass(eq=False)
class _Operation:
  """A named operation under way, and the seconds for which the process has run since it began."""

  name: str
  seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class _Alarm:
  silent: float  # seconds since the last step or since the operation began
  operation: str | None  # None: a step
  is_hang: bool  # the process must end; otherwise the step is late


class Watchdog:
  """A thread that reports late steps, and ends the process when no step completes within the timeout. One per process.

  A step: `timeout` seconds from one `step_done` to the next one or to `pause`. A long operation:
  LONG_OPERATION_FACTOR times `timeout` inside `during`; the clock of the step stands still there.

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
    recovers: bool = False,
  ) -> None:
    """timeout: seconds; 0: the process is never ended; ADAPTIVE: a late step is a hang. `start` begins the watch.

    recovers: whether the elastic loop asks the slices about a late step. An adaptive timeout leaves it a minute more.
    """
    self._adapts, self._grace = timeout == ADAPTIVE, _ADAPTIVE_TIMEOUT if recovers else 0.0
    self._timeout = _ADAPTIVE_TIMEOUT if self._adapts else timeout
    self._key = "watchdog_timeout_seconds"  # of the configuration, which sets the timeout
    self._step_limit, self._operation_limit = self._timeout, LONG_OPERATION_FACTOR * self._timeout
    self._log, self._events = log, events
    self._monotonic, self._end = monotonic, end
    self._tick = min(1.0, self._timeout / 20 or 1.0)
    self._lock = threading.RLock()  # _count calls late_after with the lock held
    self._silent: float | None = None  # seconds since the last step; None: no step is under way
    self._step: int | None = None
    self._done_at: float | None = None  # None: the time until the next step_done is no time of a step
    self._step_seconds: deque[float] = deque(maxlen=_STEPS)  # of the attempt
    self._notice_from = -math.inf  # time from which a late step may be reported
    self._operations: list[_Operation] = []
    self._stop = threading.Event()
    self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

  def start(self) -> None:
    self._thread.start()

  def step_done(self, step: int | None = None) -> None:
    """Restarts the clock of the step. step: the last completed step, for the report of a hang."""
    now = self._monotonic()
    with self._lock:
      if self._done_at is not None:
        self._step_seconds.append(now - self._done_at)
      self._silent, self._step, self._done_at = 0.0, step, now

  def part_done(self) -> None:
    """Restarts the clock of the step, which goes on: a local step of its round is done."""
    with self._lock:
      self._silent = 0.0 if self._silent is not None else None

  def pause(self) -> None:
    """Stops the clock of the step until the next `step_done`: the loop has ended. Waiting for slices has its own
    timeout."""
    with self._lock:
      self._silent = self._done_at = None
      self._step_seconds.clear()  # on other slices, a step takes another time

  def set_timeout(self, timeout: float, key: str) -> None:
    """Sets the timeout if it was 0, from now on. key: of the configuration, for the report.

    A step may still take LONG_OPERATION_FACTOR times the longest step of the attempt, and a long operation half an
    hour: a user who has set no timeout must not lose a healthy process by this one.
    """
    with self._lock:
      if self._timeout == 0:
        self._timeout, self._key = timeout, key
        self._step_limit = max(timeout, LONG_OPERATION_FACTOR * max(self._step_seconds, default=0.0))
        self._operation_limit = max(LONG_OPERATION_FACTOR * timeout, _LEAST_OPERATION_SECONDS)
        for operation in self._operations:
          operation.seconds = 0.0
        if self._silent is not None:
          self._silent = 0.0

  def late_after(self) -> float | None:
    """Seconds after which a step is late; None while too few steps are known, and during a long operation."""
    with self._lock:
      if len(self._step_seconds) < _FEWEST or self._operations:
        return None
      longest = sorted(self._step_seconds)
      return max(LATE_SECONDS, LATE_FACTOR * longest[math.ceil(0.99 * len(longest)) - 1])

  @contextlib.contextmanager
  def during(self, name: str) -> Iterator[None]:
    """Allows the operation inside the block LONG_OPERATION_FACTOR x timeout seconds. Nests; each has its own clock.

    name: what a report calls it, such as "evaluation". The clock of the step restarts after the block.
    """
    operation, began = _Operation(name), self._monotonic()
    with self._lock:
      self._operations.append(operation)
    try:
      yield
    finally:
      with self._lock:
        self._operations.remove(operation)
        if self._done_at is not None and not self._operations:
          self._done_at += self._monotonic() - began  # no part of the step
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
      alarm = self._count(min(now - before, 2 * self._tick), now)
      before = now
      if alarm is not None:
        # The hung thread may hold the lock of stdout or of a file, so the report runs in a thread, with a time limit.
        report = threading.Thread(target=self._report, args=(alarm,), name="watchdog report", daemon=True)
        report.start()
        report.join(_REPORT_SECONDS)
        if alarm.is_hang:
          self._end(HUNG)
          return

  def _count(self, seconds: float, now: float) -> _Alarm | None:
    """Adds `seconds` to the clocks that run. Returns what has gone on for too long; None if nothing has."""
    with self._lock:
      for operation in self._operations:
        operation.seconds += seconds
        if 0 < self._operation_limit <= operation.seconds:
          return _Alarm(operation.seconds, operation.name, is_hang=True)
      if self._operations or self._silent is None:
        return None
      self._silent += seconds
      late = self.late_after()
      limit = late + self._grace if self._adapts and late is not None else self._step_limit
      if 0 < limit <= self._silent:
        return _Alarm(self._silent, None, is_hang=True)
      if late is not None and self._silent >= late and now >= self._notice_from:
        self._notice_from = now + _NOTICE_SECONDS
        return _Alarm(self._silent, None, is_hang=False)
    return None

  def _report(self, alarm: _Alarm) -> None:
    with tempfile.TemporaryFile() as file:  # faulthandler writes to a descriptor only
      faulthandler.dump_traceback(file=file, all_threads=True)
      file.seek(0)
      stacks = file.read().decode("utf-8", "replace")
    kind = "hang" if alarm.is_hang else "late_step"
    self._events.emit(kind, step=self._step, silent_seconds=alarm.silent, operation=alarm.operation)
    self._log.record(stacks)
    with contextlib.suppress(OSError):
      os.write(2, stacks.encode())  # not by faulthandler, which would hold the GIL while nobody reads a pipe
    limit = f"{self._key}={ADAPTIVE if self._adapts else self._timeout:g}"
    if alarm.operation is not None:
      limit = f"{LONG_OPERATION_FACTOR} x {self._key}={self._timeout:g}"
      what = f"{alarm.operation} has not finished in {alarm.silent:.0f} s ({limit})"
    elif alarm.is_hang:
      what = f"no step completed for {alarm.silent:.0f} s ({limit})"
    else:
      rule = f"more than max({LATE_SECONDS:g} s, {LATE_FACTOR:g} x the 99th percentile of the last steps)"
      what = f"the step has taken {alarm.silent:.0f} s so far, {rule}"
    end = f"; aborting with exit code {HUNG}" if alarm.is_hang else "; still waiting"
    self._log.warning(f"{what}, last completed step: {self._step}; stacks are on stderr and in the log{end}")
    self._events.flush()
    self._log.flush()
