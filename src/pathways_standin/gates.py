"""What holds back data of a hung or slow slice. Waiting costs no thread."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping


class Gate:
  """Closed until `open` is called."""

  def __init__(self, number: int) -> None:
    """number: larger than of earlier gates. A slice opens its gates in this order."""
    self.number = number
    self.is_open = False
    self._calls: list[Callable[[], None]] = []
    self._lock = threading.Lock()

  def open(self) -> None:
    """Runs what waits, in this thread."""
    with self._lock:
      self.is_open = True
      calls, self._calls = self._calls, []
    for call in calls:
      call()

  def when_open(self, call: Callable[[], None]) -> None:
    """Runs `call` as soon as the gate is open: now, or in the thread that opens it."""
    with self._lock:
      if not self.is_open:
        self._calls.append(call)
        return
    call()


def merge(of_inputs: Iterable[Mapping[int, Gate]]) -> dict[int, Gate]:
  """The gates of data that depend on all inputs: the newest gate of each slice."""
  merged: dict[int, Gate] = {}
  for gates in of_inputs:
    for slice_id, gate in gates.items():
      if slice_id not in merged or merged[slice_id].number < gate.number:
        merged[slice_id] = gate
  return merged


class Timer:
  """One thread that makes calls at given times."""

  def __init__(self) -> None:
    self._due: list[tuple[float, int, Callable[[], None]]] = []
    self._changed = threading.Condition()
    self._count = itertools.count()
    self._thread: threading.Thread | None = None

  def call_after(self, seconds: float, call: Callable[[], None]) -> None:
    """Calls once, in the thread of the timer."""
    with self._changed:
      heapq.heappush(self._due, (time.monotonic() + seconds, next(self._count), call))
      if self._thread is None:
        self._thread = threading.Thread(target=self._run, name="standin-timer", daemon=True)
        self._thread.start()
      self._changed.notify()

  def _run(self) -> None:
    while True:
      with self._changed:
        while not self._due or self._due[0][0] > time.monotonic():
          self._changed.wait(self._due[0][0] - time.monotonic() if self._due else None)
        call = heapq.heappop(self._due)[2]
      call()
