"""A thread that writes the numbers of steps, so that no slow disk and no service that is down delays a step."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from trainer.observe.files import LONGEST_WAIT_SECONDS
from trainer.observe.log import Log

MOST_WAITING = 30_000  # records for a destination that does not answer
THREAD = "writer of "  # begins the name of a thread that may wait for a destination at the end of the process

Scalars = Mapping[str, float]  # tag -> value


class Destination(Protocol):
  """Where records go. All calls come from one thread, in order. A destination for the numbers of steps also has
  `write`, with the arguments of `BackgroundWriter.write`."""

  def flush(self) -> None:
    """Returns when readers can see all numbers so far."""

  def close(self, exit_code: int | None) -> None:
    """Writes what is left. exit_code: of the process; None: another process writes from here on."""


class BackgroundWriter:
  """Writes to a Destination from a thread. The first error ends the writing, with one warning, and not the training."""

  def __init__(
    self, name: str, open_destination: Callable[[], Destination], log: Log, remedy: str, *, waits: bool
  ) -> None:
    """open_destination: called in the thread, at the first write: imports of such libraries take seconds.

    name, remedy: for the warning, such as `TensorBoard files` and `services without tensorboard turns them off`.
    waits: whether `flush` waits. Else a process that resumes the run must add what is missing.
    """
    self._name, self._open, self._log, self._remedy = name, open_destination, log, remedy
    self._waits = waits
    self._destination: Any = None
    self._failed = False
    self._deadline = 0.0
    self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
    # A daemon: the interpreter's end does not wait for a destination that does not answer.
    self._thread = threading.Thread(target=self._run, name=f"{THREAD}{name}", daemon=True)
    self._thread.start()

  def write(self, step: int, scalars: Scalars, wall: float, *, is_step: bool) -> None:
    """Adds the numbers of a completed step, or (is_step=False) of an evaluation after it. Returns at once.

    wall: epoch seconds. A step at or before the last one is a step that is done again.
    """
    self.put(lambda destination: destination.write(step, scalars, wall, is_step=is_step))

  def put(self, use: Callable[[Any], None]) -> None:
    """Calls `use` with the destination in the thread. Returns at once."""
    if self._tasks.qsize() >= MOST_WAITING:
      self._fail(f"no answer, and {MOST_WAITING} records wait")
    if not self._failed:
      self._tasks.put(lambda: self._use(use))

  def flush(self, *, wait: bool = True) -> None:
    """Begins to write all numbers. With wait and waits=True, returns when that is done. Gives a destination up that
    takes more than LONGEST_WAIT_SECONDS."""
    if self._failed:
      return
    done = threading.Event()
    self._tasks.put(self._flush)
    if wait and self._waits:
      self._tasks.put(done.set)
      if not done.wait(LONGEST_WAIT_SECONDS):
        self._fail(f"no answer for {LONGEST_WAIT_SECONDS:g} s")

  def close(self, exit_code: int | None) -> None:
    """Begins to write what is left and to close the destination. Call `join` afterwards."""
    self._deadline = time.monotonic() + LONGEST_WAIT_SECONDS
    self._tasks.put(lambda: self._close(exit_code))
    self._tasks.put(None)

  def join(self) -> None:
    """Waits until the destination is closed, or gives up LONGEST_WAIT_SECONDS after `close`."""
    self._thread.join(max(0.0, self._deadline - time.monotonic()))
    if self._thread.is_alive():
      self._fail(f"no answer for {LONGEST_WAIT_SECONDS:g} s")

  def _run(self) -> None:
    for task in iter(self._tasks.get, None):
      try:
        task()
      except Exception as error:  # noqa: BLE001 - each library raises its own types; none may end the training
        self._fail(error)

  def _fail(self, error: object) -> None:
    if not self._failed:
      self._failed = True
      self._log.warning(f"no {self._name} from here on: {error} ({self._remedy})")

  def _use(self, use: Callable[[Any], None]) -> None:
    if self._failed:
      return
    if self._destination is None:
      self._destination = self._open()
    use(self._destination)

  def _flush(self) -> None:
    if self._destination is not None and not self._failed:
      self._destination.flush()

  def _close(self, exit_code: int | None) -> None:
    destination, self._destination = self._destination, None
    if destination is not None:
      destination.close(exit_code)


def has_pending() -> bool:
  """Whether a writer of this process still waits for a destination that does not answer."""
  return any(thread.name.startswith(THREAD) for thread in threading.enumerate())
