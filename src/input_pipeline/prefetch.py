"""A background thread that prepares the items of the next steps while the current step runs."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, Self, TypeVar

from input_pipeline.batch import DataError

X = TypeVar("X")

_DEPTH = 2  # batches that are prepared ahead of the step


class Prefetcher(Generic[X]):
  """Iterates over (step, fn(step)) for step in range(first_step, last_step), up to `depth` items ahead.

  One thread calls fn in order, at most once per step. At most `depth` finished items wait, in addition to the item in
  use. If fn raises, next() raises DataError from that exception (or the DataError itself) at that step, after the items
  before it, and at every later call. Close it, or use it as a context manager; the thread ends then, or when the last
  step is prepared.
  """

  def __init__(self, fn: Callable[[int], X], first_step: int, last_step: int, depth: int = _DEPTH) -> None:
    """`last_step` is excluded, as in range()."""
    self.waited_seconds = 0.0
    """How long the last next() waited for its item."""
    self._fn = fn
    self._steps = range(first_step, last_step)
    self._next = first_step
    self._depth = depth
    self._ready: deque[tuple[int, X]] = deque()
    self._error: DataError | None = None
    self._closed = False
    self._changed = threading.Condition()
    self._thread = threading.Thread(target=self._work, name="prefetch", daemon=True)
    self._thread.start()

  def __iter__(self) -> Iterator[tuple[int, X]]:
    return self

  def __next__(self) -> tuple[int, X]:
    started = time.perf_counter()
    try:
      return self._take()
    finally:
      self.waited_seconds = time.perf_counter() - started

  def _take(self) -> tuple[int, X]:
    """The next item that the thread has prepared."""
    with self._changed:
      item = self._first()
      self._ready.popleft()
      self._next += 1
      self._changed.notify_all()
      return item

  def peek(self) -> X:
    """The item that next() will return after this one. Waits, and raises, as next() does."""
    with self._changed:
      return self._first()[1]

  def _first(self) -> tuple[int, X]:
    self._changed.wait_for(lambda: self._ready or self._error or self._closed or self._next not in self._steps)
    if self._closed or not (self._ready or self._error):
      raise StopIteration
    if not self._ready:
      assert self._error is not None
      raise self._error
    return self._ready[0]

  def _work(self) -> None:
    """Body of the thread: prepares each step in order until closed, complete or failed."""
    for step in self._steps:
      with self._changed:
        self._changed.wait_for(lambda: self._closed or len(self._ready) < self._depth)
        if self._closed:
          return
      try:
        item = self._fn(step)
      except BaseException as error:  # noqa: BLE001  (any exception that ends the thread must wake the consumer)
        with self._changed:
          self._error = _as_data_error(step, error)
          self._changed.notify_all()
        return
      with self._changed:
        if self._closed:
          return
        self._ready.append((step, item))
        self._changed.notify_all()

  def close(self, timeout_seconds: float = 10.0) -> bool:
    """Returns whether the thread has ended. Drops prepared items; a consumer that waits gets StopIteration.

    Idempotent, from any thread. Waits up to `timeout_seconds` for a running call of fn. If the call takes longer, the
    thread (a daemon) ends after it.
    """
    with self._changed:
      self._closed = True
      self._ready.clear()
      self._changed.notify_all()
    if self._thread is threading.current_thread():
      return True
    self._thread.join(timeout_seconds)
    return not self._thread.is_alive()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *error: object) -> None:
    self.close()


def _as_data_error(step: int, error: BaseException) -> DataError:
  if isinstance(error, DataError):
    return error
  wrapped = DataError(step, f"preparing the batch failed: {type(error).__name__}: {error}")
  wrapped.__cause__ = error
  return wrapped
