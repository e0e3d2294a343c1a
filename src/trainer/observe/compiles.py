"""Counts XLA compilations: recoveries promise not to compile, and this is how they show it."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Self

import jax.monitoring

# jax records the duration of every trip to the compiler, and inside it an event if the persistent cache had the result.
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
CACHE_HIT_EVENT = "/jax/compilation_cache/cache_hits"


@dataclasses.dataclass(frozen=True)
class Compiles:
  """Counts since the counter began, or the difference of two readings."""

  compilations: int = 0  # XLA ran, in the foreground
  cached: int = 0  # loaded from the persistent cache instead, in the foreground
  seconds: float = 0.0  # both together
  background: int = 0  # XLA ran, in the background
  background_cached: int = 0
  background_seconds: float = 0.0

  def __sub__(self, earlier: Compiles) -> Compiles:
    values = zip(dataclasses.astuple(self), dataclasses.astuple(earlier), strict=True)
    return Compiles(*(now - then for now, then in values))


class CompileCounter:
  """Counts from entering `with` until leaving it; `read()` at any time, from any thread.

  Every thread is the foreground, because the training loop may wait for it, but those inside `with background()`.
  """

  def __enter__(self) -> Self:
    self._background: set[int] = set()
    self._lock = threading.Lock()
    self._counts = Compiles()
    self._hits: set[int] = set()  # threads whose current compile was found in the cache
    # Bound methods are made anew at each access: unregistering compares, and equal is enough.
    jax.monitoring.register_event_listener(self._on_event)
    jax.monitoring.register_event_duration_secs_listener(self._on_duration)
    return self

  def __exit__(
    self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
  ) -> None:
    jax.monitoring.unregister_event_listener(self._on_event)
    jax.monitoring.unregister_event_duration_listener(self._on_duration)

  @contextlib.contextmanager
  def background(self) -> Iterator[None]:
    """What this thread compiles inside the block holds nobody up."""
    thread = threading.get_ident()
    self._background.add(thread)
    try:
      yield
    finally:
      self._background.discard(thread)

  def read(self) -> Compiles:
    with self._lock:
      return self._counts

  def _on_event(self, event: str, **_: str | int) -> None:
    if event == CACHE_HIT_EVENT:
      with self._lock:
        self._hits.add(threading.get_ident())

  def _on_duration(self, event: str, duration: float, **_: str | int) -> None:
    if event != COMPILE_EVENT:
      return
    thread = threading.get_ident()
    prefix = "background_" if thread in self._background else ""
    with self._lock:
      hit = thread in self._hits
      self._hits.discard(thread)
      counter = f"{prefix}cached" if hit else (prefix.rstrip("_") or "compilations")
      old = self._counts
      self._counts = dataclasses.replace(
        old,
        **{counter: getattr(old, counter) + 1, f"{prefix}seconds": getattr(old, f"{prefix}seconds") + duration},
      )
