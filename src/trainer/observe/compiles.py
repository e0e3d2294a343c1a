"""Counts XLA compilations. Recoveries promise not to compile; this counter proves it."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Self

import jax.monitoring

# JAX records the duration of each compilation request, and an event if the persistent cache held the result.
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
CACHE_HIT_EVENT = "/jax/compilation_cache/cache_hits"

_FOREGROUND, _BACKGROUND, _UNCOUNTED = "foreground", "background", "uncounted"
# A new thread starts with the default: a block marks only the thread that runs it.
_kind: ContextVar[str] = ContextVar("kind of compilation", default=_FOREGROUND)


@contextlib.contextmanager
def _marked(kind: str) -> Iterator[None]:
  token = _kind.set(kind)
  try:
    yield
  finally:
    _kind.reset(token)


def background() -> contextlib.AbstractContextManager[None]:
  """Inside this block, compilations of this thread count as background: the training loop does not wait for them."""
  return _marked(_BACKGROUND)


def uncounted() -> contextlib.AbstractContextManager[None]:
  """Inside this block, compilations of this thread are not counted: health checks are no part of a recovery."""
  return _marked(_UNCOUNTED)


@dataclasses.dataclass(frozen=True)
class Compiles:
  """Counts since the counter began, or the difference of two readings."""

  compilations: int = 0  # XLA ran, in the foreground
  cached: int = 0  # loaded from the persistent cache, in the foreground
  seconds: float = 0.0  # of both
  background: int = 0  # XLA ran, in the background
  background_cached: int = 0
  background_seconds: float = 0.0

  def __sub__(self, earlier: Compiles) -> Compiles:
    values = zip(dataclasses.astuple(self), dataclasses.astuple(earlier), strict=True)
    return Compiles(*(now - then for now, then in values))


class CompileCounter:
  """Counts from entering `with` until leaving it; call `read()` at any time, from any thread.

  Every thread counts as foreground, except inside `with background()` and `with uncounted()`.
  """

  def __enter__(self) -> Self:
    self._lock = threading.Lock()
    self._counts = Compiles()
    self._hits: set[int] = set()  # threads whose current compilation was found in the cache
    jax.monitoring.register_event_listener(self._on_event)
    jax.monitoring.register_event_duration_secs_listener(self._on_duration)
    return self

  def __exit__(self, *error: object) -> None:
    jax.monitoring.unregister_event_listener(self._on_event)
    jax.monitoring.unregister_event_duration_listener(self._on_duration)

  def read(self) -> Compiles:
    with self._lock:
      return self._counts

  def _on_event(self, event: str, **_: str | int) -> None:
    if event == CACHE_HIT_EVENT:
      with self._lock:
        self._hits.add(threading.get_ident())

  def _on_duration(self, event: str, duration: float, **_: str | int) -> None:
    """JAX calls this on the thread that compiled."""
    if event != COMPILE_EVENT:
      return
    thread, kind = threading.get_ident(), _kind.get()
    with self._lock:
      hit = thread in self._hits
      self._hits.discard(thread)
      if kind == _UNCOUNTED:
        return
      old = self._counts
      if kind == _BACKGROUND:
        self._counts = dataclasses.replace(
          old,
          background=old.background + (not hit),
          background_cached=old.background_cached + hit,
          background_seconds=old.background_seconds + duration,
        )
      else:
        self._counts = dataclasses.replace(
          old, compilations=old.compilations + (not hit), cached=old.cached + hit, seconds=old.seconds + duration
        )
