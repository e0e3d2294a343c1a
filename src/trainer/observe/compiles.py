"""Counts XLA compilations. Recoveries promise not to compile; this counter proves it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Self

import jax.monitoring

# JAX records the duration of each compilation request, and an event if the persistent cache held the result.
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
CACHE_HIT_EVENT = "/jax/compilation_cache/cache_hits"

# A new thread starts with the default: `uncounted` marks only the thread that runs it.
_is_counted: ContextVar[bool] = ContextVar("whether compilations are counted", default=True)


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
  """Inside this block, compilations of this thread are not counted: the training loop does not wait for compilations
  in the background, and compilations of health checks are no part of a recovery."""
  token = _is_counted.set(False)
  try:
    yield
  finally:
    _is_counted.reset(token)


class CompileCounter:
  """Counts the compilations of all threads, except inside `uncounted`, from entering `with` until leaving it."""

  def __enter__(self) -> Self:
    self.compilations = 0  # times that XLA ran; programs from the persistent cache do not count
    self._lock = threading.Lock()
    self._hits: set[int] = set()  # threads whose current compilation was found in the cache
    jax.monitoring.register_event_listener(self._on_event)
    jax.monitoring.register_event_duration_secs_listener(self._on_duration)
    return self

  def __exit__(self, *error: object) -> None:
    jax.monitoring.unregister_event_listener(self._on_event)
    jax.monitoring.unregister_event_duration_listener(self._on_duration)

  def _on_event(self, event: str, **_: str | int) -> None:
    if event == CACHE_HIT_EVENT:
      with self._lock:
        self._hits.add(threading.get_ident())

  def _on_duration(self, event: str, duration: float, **_: str | int) -> None:
    """JAX calls this on the thread that compiled."""
    if event != COMPILE_EVENT:
      return
    thread = threading.get_ident()
    with self._lock:
      if thread in self._hits:
        self._hits.remove(thread)
      elif _is_counted.get():
        self.compilations += 1
