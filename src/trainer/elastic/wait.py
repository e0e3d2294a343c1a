"""Waits of an attempt: for slices that may have stopped answering, or until the process must stop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from trainer.cluster import Cluster, View
from trainer.elastic.classification import SliceHang
from trainer.observe.log import Log
from trainer.process.stop import StopRequested

X = TypeVar("X")
CHECK_SECONDS = 60.0  # without a result until the slices are asked, before the times of steps say when work is late
_POLL_SECONDS = 0.1


class Task(Generic[X]):
  """A call in a daemon thread of its own. Nobody joins the thread if the caller gives up waiting."""

  def __init__(self, call: Callable[[], X], what: str) -> None:
    """`what` names the call in messages."""
    self.what = what
    self._call = call
    self._result: X
    self._error: BaseException | None = None
    self._thread = threading.Thread(target=self._run, name=f"wait for {what}", daemon=True)
    self._thread.start()

  def is_done(self, timeout: float | None) -> bool:
    """Whether the call has ended within `timeout` seconds; None: waits until it has."""
    self._thread.join(timeout)
    return not self._thread.is_alive()

  def result(self) -> X:
    """What the call returned; raises what it raised. Waits for its end."""
    self._thread.join()
    if self._error is not None:
      raise self._error
    return self._result

  def _run(self) -> None:
    try:
      self._result = self._call()
    except BaseException as error:  # noqa: BLE001 -- raised again by result()
      self._error = error


class Wait:
  """The waits of one attempt on the slices of a view."""

  def __init__(
    self,
    cluster: Cluster,
    view: View,
    check_seconds: float,
    silence_seconds: float,
    log: Log,
    late_after: Callable[[], float | None] = lambda: None,
    stop: Callable[[], bool] = lambda: False,
  ) -> None:
    """check_seconds: time without a result until the slices are asked; 0: wait as long as it takes.
    silence_seconds: time after which the attempt is given up even though no slice answers at all.
    late_after: seconds after which the work under way is late, if known; then the slices are asked already.
    stop: whether the process must stop."""
    self._cluster, self._view, self._log = cluster, view, log
    self._late_after, self._stop = late_after, stop
    self._check_seconds, self._silence_seconds = check_seconds, silence_seconds

  def call(self, work: Callable[[], X], what: str, *, until_stop: bool = False) -> X:
    """The result of work(), which waits for the slices; raises its error. `what` names it in messages. Raises SliceHang
    if the work is silent and slices of the view do not answer, and with until_stop StopRequested once the process must
    stop. The work then goes on in its thread."""
    return work() if self._check_seconds == 0 and not until_stop else self.result(Task(work, what), until_stop)

  def until_stop(self, work: Callable[[], X], what: str) -> X:
    """The result of work(), which needs no slice. Raises its error, and StopRequested once the process must stop."""
    task = Task(work, what)
    self._is_done(task, 0.0, until_stop=True)
    return task.result()

  def result(self, task: Task[X], until_stop: bool = False) -> X:
    """As `call`, for a call that has been started."""
    seconds, waited = min(self._check_seconds, self._late_after() or self._check_seconds), 0.0
    warn_at = 0.0  # doubles, so that a long wait does not fill the log
    while not self._is_done(task, seconds, until_stop):
      waited += seconds
      late = f"{task.what} has not finished in {waited:g} s"
      missing = frozenset(self._view.slices) - self._cluster.alive()
      if missing and (self._proves_a_hang(missing) or waited >= self._silence_seconds):
        raise SliceHang(f"{late} and slices {sorted(missing)} do not answer", missing)
      if waited < warn_at:
        continue
      warn_at = 2 * waited
      if missing:
        self._log.warning(f"{late} and no slice answers; waiting for up to {self._silence_seconds:g} s")
      else:
        self._log.warning(f"{late}; all its slices answer, still waiting")
    return task.result()

  def _is_done(self, task: Task[X], seconds: float, until_stop: bool) -> bool:
    """Whether the task has ended within `seconds`; 0: waits until it has."""
    if not until_stop:
      return task.is_done(seconds or None)
    end = time.monotonic() + (seconds or threading.TIMEOUT_MAX)
    while (left := end - time.monotonic()) > 0:
      if task.is_done(min(left, _POLL_SECONDS)):
        return True
      if self._stop():
        raise StopRequested
    return False

  def _proves_a_hang(self, missing: frozenset[int]) -> bool:
    """Whether the missing slices are lost. A long step delays the health checks of all its slices alike: if no slice
    answers, that alone proves nothing."""
    return missing != frozenset(self._view.slices) or bool(self._cluster.died(self._view))
