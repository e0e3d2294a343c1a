"""Compiles the steps for the topologies that may come next, in the background, so that a lost slice costs no compile.

An executable is bound to its devices: one per set of living slices. With N slices those are the N ways to lose one.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

from trainer.cluster import Cluster, View
from trainer.observe import compiles
from trainer.observe.events import EventLog

_NICENESS = 10
_THREAD = "prepare-topologies"


def next_views(cluster: Cluster, view: View) -> list[View]:
  """The views that one event can make of `view`: all slices back when some are missing, then each one lost."""
  fewer = [cluster.view(set(view.slices) - {i}) for i in view.slices if view.num_alive > 1]
  return fewer if view.is_full else [cluster.view(cluster.slices), *fewer]


def under_way() -> bool:
  """Whether a topology is being compiled now. The interpreter's end would wait for it: nothing can interrupt XLA."""
  return any(thread.name == _THREAD for thread in threading.enumerate())


class Preparation:
  """One background thread that fills `compiled` (keyed by View.slices) until done or cancelled.

  compile(view) must touch no array of the running attempt. If it raises, the traceback is printed and the preparation
  ends: the attempt that needs the topology compiles, and fails, in the foreground.
  """

  def __init__(
    self,
    compile: Callable[[View], Any],
    views: Iterable[View],
    compiled: MutableMapping[tuple[int, ...], Any],
    events: EventLog,
    *,
    worth_it: Callable[[], bool] = lambda: True,
    after: Preparation | None = None,
  ) -> None:
    """worth_it: asked before each topology. after: an earlier preparation, whose last compilation is waited for."""
    self._compile = compile
    self._views = list(views)
    self._compiled = compiled
    self._events = events
    self._worth_it = worth_it
    self._after = after
    self._cancelled = threading.Event()
    self._current: tuple[int, ...] | None = None
    # Not a daemon: the interpreter must not end while XLA compiles.
    self._thread = threading.Thread(target=self._run, name=_THREAD)
    self._thread.start()

  def finish(self, view: View) -> None:
    """Begins no further topology; waits for the compilation under way if it is the one for `view`."""
    self.cancel()
    if (after := self._after) is not None:  # the thread drops it meanwhile
      after.finish(view)
    if self._current == view.slices:
      self._thread.join()

  def cancel(self) -> None:
    """Begins no further topology."""
    self._cancelled.set()

  def wait(self, timeout: float | None) -> bool:
    """Whether the thread has ended within `timeout` seconds (None: waits until it has)."""
    self._thread.join(timeout)
    return not self._thread.is_alive()

  def _run(self) -> None:
    if hasattr(os, "setpriority"):
      os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)  # on Linux it is the thread's own priority
    if self._after is not None:
      self._after.wait(None)
      self._after = None
    for view in self._views:
      if view.slices in self._compiled:
        continue
      self._current = view.slices
      if self._cancelled.is_set() or not self._worth_it():
        break
      start = time.monotonic()
      with compiles.background():
        self._compiled[view.slices] = self._compile(view)
      seconds = time.monotonic() - start
      self._events.emit("compile", what=f"slices {list(view.slices)}", seconds=seconds, background=True)
    self._current = None
