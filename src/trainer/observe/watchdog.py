"""Aborts a hung process so that the scheduler can restart it: exit code 134 after dumping every thread's stack."""

from __future__ import annotations

import contextlib
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


class Watchdog:
  """A thread that ends the process when `timeout` seconds have passed since the last `beat`. One per process.

  It counts from a beat to the next one or to `rest`, and not inside `paused`.

  A process that was stopped and continued (SIGSTOP, a suspended machine) is not hung: the thread counts only time in
  which it ran itself, in ticks. For the same reason it cannot see code that hangs while holding the GIL; that only an
  outside supervisor can.
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
    """timeout: seconds; 0 turns the watchdog off. Nothing is counted before `start` and the first beat."""
    self._timeout = timeout
    self._log, self._events = log, events
    self._monotonic, self._end = monotonic, end
    self._tick = min(1.0, timeout / 20)
    self._lock = threading.Lock()
    self._silent: float | None = None  # seconds since the last beat; None: at rest
    self._step: int | None = None
    self._paused = 0
    self._stop = threading.Event()
    self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

  def start(self) -> None:
    if self._timeout > 0:
      self._thread.start()

  def beat(self, step: int | None = None) -> None:
    """Says that the loop is alive; `step`: the step that has completed, for the report of a hang."""
    with self._lock:
      self._silent, self._step = 0.0, step

  def rest(self) -> None:
    """Does not count until the next beat: the loop has ended, and whoever waits for slices has a timeout of its own."""
    with self._lock:
      self._silent = None

  @contextlib.contextmanager
  def paused(self) -> Iterator[None]:
    """Does not count inside the block (a compile, a save, an evaluation); counts anew after it. Nests."""
    with self._lock:
      self._paused += 1
    try:
      yield
    finally:
      with self._lock:
        self._paused -= 1
        if self._silent is not None:
          self._silent = 0.0

  def stop(self) -> None:
    """Ends the thread. Stopping twice, or before `start`, is allowed."""
    self._stop.set()
    if self._thread.is_alive():
      self._thread.join()

  def _run(self) -> None:
    before = self._monotonic()
    while not self._stop.wait(self._tick):
      now = self._monotonic()
      with self._lock:
        if not self._paused and self._silent is not None:
          # A tick that took much longer than asked for: the whole process stood still, not only the loop.
          self._silent += min(now - before, 2 * self._tick)
        silent, step = self._silent, self._step
      before = now
      if silent is not None and silent >= self._timeout:
        self._abort(silent, step)
        return

  def _abort(self, silent: float, step: int | None) -> None:
    # Whoever hangs may hold the lock of stdout or of a file: reporting gets a thread and a few seconds, no more.
    report = threading.Thread(target=self._report, args=(silent, step), name="watchdog report", daemon=True)
    report.start()
    report.join(5.0)
    self._end(EXIT_CODE)

  def _report(self, silent: float, step: int | None) -> None:
    faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
    with tempfile.TemporaryFile() as file:  # faulthandler writes to a descriptor only
      faulthandler.dump_traceback(file=file, all_threads=True)
      file.seek(0)
      stacks = file.read().decode("utf-8", "replace")
    self._events.emit("hang", step=step, silent_seconds=silent)
    self._log.record(stacks)
    self._log.warning(
      f"no step completed for {silent:.0f} s (watchdog_timeout_seconds={self._timeout:g}), last completed step: "
      f"{step}; stacks are on stderr and in the log; aborting with exit code {EXIT_CODE}"
    )
    self._events.flush()
    self._log.flush()
