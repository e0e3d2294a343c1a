"""Waits that notice slices which have stopped answering."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from trainer.cluster import Cluster, View
from trainer.elastic.events import SliceHang
from trainer.observe.log import Log
from trainer.process.signals import StopRequested

X = TypeVar("X")
CHECK_SECONDS = 60.0  # without a result until the slices are asked, before the times of steps say when work is late
_POLL_SECONDS = 0.1


class HangGuard:
  """Waits for the work of one attempt. Raises SliceHang when the work is silent and slices of the view do not answer.
  Then the waiting thread stays blocked for good: it is a daemon, and nobody joins it."""

  def __init__(
    self,
    cluster: Cluster,
    view: View,
    check_seconds: float,
    silence_seconds: float,
    log: Log,
    late_after: Callable[[], float | None] = lambda: None,
  ) -> None:
    """check_seconds: time without a result until the slices are asked; 0: wait as long as it takes.
    silence_seconds: time after which the attempt is given up even though no slice answers at all.
    late_after: seconds after which the work under way is late, if known; then the slices are asked already."""
    self._cluster, self._view, self._log = cluster, view, log
    self._late_after = late_after
    self._check_seconds, self._silence_seconds = check_seconds, silence_seconds

  def call(self, work: Callable[[], X], what: str) -> X:
    """The result of work(), in a thread if slices are to be asked; raises its error. what: its name in messages."""
    return work() if self._check_seconds == 0 else self.result(Waiter(work, what))

  def result(self, waiter: Waiter[X]) -> X:
    """The result of a call that has been started; raises its error."""
    seconds, waited = min(self._check_seconds, self._late_after() or self._check_seconds), 0.0
    warn_at = 0.0  # doubles, so that a long wait does not fill the log
    while not waiter.done(seconds or None):
      waited += seconds
      late = f"{waiter.what} has not finished in {waited:g} s"
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
    return waiter.result()

  def _proves_a_hang(self, missing: frozenset[int]) -> bool:
    """Whether the missing slices are lost. A long step delays the health checks of all its slices alike: if no slice
    answers, that alone proves nothing."""
    return missing != frozenset(self._view.slices) or bool(self._cluster.died(self._view))


class Waiter(Generic[X]):
  """A call in a daemon thread of its own, so that the caller can do other things or look up from waiting."""

  def __init__(self, call: Callable[[], X], what: str) -> None:
    """`what` names the call in messages."""
    self.what = what
    self._call = call
    self._result: X
    self._error: BaseException | None = None
    self._thread = threading.Thread(target=self._run, name=f"wait for {what}", daemon=True)
    self._thread.start()

  def done(self, timeout: float | None) -> bool:
    """Whether the call has ended within `timeout` seconds; None: waits until it has."""
    self._thread.join(timeout)
    return not self._thread.is_alive()

  def result(self) -> X:
    """What the call returned; raises what it raised. Waits for its end."""
    self._thread.join()
    if self._error is not None:
      raise self._error
    return self._result

  def unless(self, stop: Callable[[], bool]) -> X:
    """As `result`, but raises StopRequested once stop() is true. Then nobody joins the thread, which goes on."""
    while not self.done(_POLL_SECONDS):
      if stop():
        raise StopRequested
    return self.result()

  def _run(self) -> None:
    try:
      self._result = self._call()
    except BaseException as error:  # noqa: BLE001 -- raised again by result()
      self._error = error
