"""Programs and compiled steps, one per set of living slices. The next topologies' are compiled in the background.

An executable is bound to its devices, so each set of slices needs its own. With N slices alive, N sets remain after the
loss of one slice.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from trainer.cluster import Cluster, View
from trainer.observe import compiles
from trainer.observe.compiles import CompileCounter
from trainer.observe.events import EventLog
from trainer.observe.log import Log

_NICENESS = 10

P = TypeVar("P")
X = TypeVar("X")


def next_views(cluster: Cluster, view: View) -> list[View]:
  """The views that one event can make of `view`: all slices returned (if some are missing), then each slice lost."""
  fewer = [cluster.view(set(view.slices) - {i}) for i in view.slices if view.num_alive > 1]
  return fewer if view.is_full else [cluster.view(cluster.slices), *fewer]


@dataclass
class CachedProgram(Generic[P]):
  """What is known of one set of slices: its program, its compiled step and evaluation (None: not compiled yet)."""

  program: P
  step: Any = None
  evaluation: Any = None


class ProgramCache(Generic[P]):
  """The topologies of one process, by View.slices. Outlives attempts."""

  def __init__(
    self,
    build: Callable[[View], P],
    compile_step: Callable[[P], Any],
    events: EventLog,
    log: Log,
    counter: CompileCounter,
    clock: Callable[[], float] = time.monotonic,
  ) -> None:
    """build: the program of a view; compile_step: its compiled step, without touching an array of a running attempt."""
    self._build, self._compile = build, compile_step
    self._events, self._log, self._clock = events, log, clock
    self.counter = counter
    self.topologies: dict[tuple[int, ...], CachedProgram[P]] = {}
    self.checks: dict[int, Any] = {}  # by slice: what drivers.slice_witness has compiled
    self.compile_seconds = 0.0  # of the last step that was compiled in the foreground
    self._lock = threading.Lock()  # one topology is built at a time, and each only once
    self._background: _BackgroundCompiler | None = None

  def program(self, view: View) -> P:
    """The program for the slices of `view`, built once."""
    return self._topology(view).program

  def step(self, view: View) -> Any:
    """The compiled step of `view`: kept, compiled in the background (waits for it), or compiled now. No further
    background compilation begins: the topologies to prepare depend on the view that runs."""
    if self._background is not None:
      self._background.stop(wait_for=view)
    topology = self._topology(view)
    if topology.step is None:
      start = self._clock()
      topology.step = self.recorded(f"slices {list(view.slices)}", lambda: self._compile(topology.program))
      self.compile_seconds = self._clock() - start
    return topology.step

  def evaluation(self, view: View, compile_evaluation: Callable[[P], X]) -> X:
    """The compiled evaluation of `view`: kept, or compiled now."""
    topology = self._topology(view)
    if topology.evaluation is None:
      what = f"evaluation on slices {list(view.slices)}"
      topology.evaluation = self.recorded(what, lambda: compile_evaluation(topology.program))
    return topology.evaluation

  def recorded(self, what: str, compile_now: Callable[[], X]) -> X:
    """Returns compile_now(), and records its time in a `compile` event. The training loop waits for it, unless the
    attempt has ended meanwhile, because a slice was lost."""
    attempt, before, start = self._events.attempt, self.counter.compilations, self._clock()
    self._log.line(f"Compiling for {what} ...")
    compiled = compile_now()
    seconds, compilations = self._clock() - start, self.counter.compilations - before
    fields = {"background": self._events.attempt != attempt, "cached": compilations == 0, "compilations": compilations}
    self._events.emit("compile", what=what, seconds=seconds, **fields)
    return compiled

  def has_step(self, slices: Iterable[int]) -> bool:
    """Whether the step for exactly these slices is compiled."""
    topology = self.topologies.get(tuple(sorted(slices)))
    return topology is not None and topology.step is not None

  def forget_steps(self) -> None:
    """Drops all compiled programs, for the case that one of them is the cause of an unexplained error."""
    for topology in self.topologies.values():
      topology.step = topology.evaluation = None
    self.checks.clear()

  def prepare(self, views: Iterable[View], worthwhile: Callable[[], bool]) -> None:
    """Compiles the steps of `views` in the background, in this order, each if worthwhile() is still true. If a
    compilation fails, its traceback is printed, and no other follows: an attempt that needs the step fails in the
    foreground."""
    missing = [view for view in views if not self.has_step(view.slices)]
    if missing:
      names = ", ".join(str(list(view.slices)) for view in missing)
      self._log.detail(f"Preparing in the background the steps for slices {names}.")
      self._background = _BackgroundCompiler(self._prepare_one, missing, worthwhile, after=self._background)

  def wait(self, timeout: float | None) -> bool:
    """Whether the background compilations have ended within `timeout` seconds (None: waits until they have)."""
    return self._background is None or self._background.wait(timeout)

  def close(self) -> None:
    """Begins no further compilation. Does not wait for the one under way."""
    if self._background is not None:
      self._background.stop()

  def _topology(self, view: View) -> CachedProgram[P]:
    with self._lock:
      if view.slices not in self.topologies:
        self.topologies[view.slices] = CachedProgram(self._build(view))
      return self.topologies[view.slices]

  def _prepare_one(self, view: View, number: int, count: int) -> None:
    if self.has_step(view.slices):
      return
    start = self._clock()
    with compiles.uncounted():
      topology = self._topology(view)
      topology.step = self._compile(topology.program)
    seconds = self._clock() - start
    self._events.emit("compile", what=f"slices {list(view.slices)}", seconds=seconds, background=True)
    self._log.detail(f"Prepared the step for slices {list(view.slices)} in {seconds:.1f} s ({number} of {count}).")


class _BackgroundCompiler:
  """One thread that compiles for a list of views until done or stopped."""

  def __init__(
    self,
    compile_one: Callable[[View, int, int], None],
    views: list[View],
    worthwhile: Callable[[], bool],
    after: _BackgroundCompiler | None,
  ) -> None:
    """compile_one(view, number, count) of `views`; after: an earlier compiler, whose last compilation is waited for."""
    self._compile_one, self._views, self._worthwhile, self._after = compile_one, views, worthwhile, after
    self._stopped = threading.Event()
    self._current: tuple[int, ...] | None = None
    # Not a daemon: the interpreter must not end while XLA compiles.
    self._thread = threading.Thread(target=self._run, name="compile next topologies")
    self._thread.start()

  def stop(self, wait_for: View | None = None) -> None:
    """Begins no further topology; waits for the compilation under way if it is for `wait_for`."""
    self._stopped.set()
    if (after := self._after) is not None:  # the thread clears the attribute meanwhile
      after.stop(wait_for)
    if wait_for is not None and self._current == wait_for.slices:
      self._set_niceness(0)  # a recovery waits for it now
      self._thread.join()

  def wait(self, timeout: float | None) -> bool:
    """Whether the thread has ended within `timeout` seconds (None: waits until it has)."""
    if timeout is None:
      self._set_niceness(0)  # on a busy machine, a thread of low priority would keep the caller waiting
    self._thread.join(timeout)
    return not self._thread.is_alive()

  def _run(self) -> None:
    self._set_niceness(_NICENESS)
    if self._after is not None:
      self._after.wait(None)
      self._after = None
    for number, view in enumerate(self._views, 1):
      self._current = view.slices
      if self._stopped.is_set() or not self._worthwhile():
        break
      self._compile_one(view, number, len(self._views))
    self._current = None

  def _set_niceness(self, niceness: int) -> None:
    """Sets the priority of the compiling thread. On Linux a thread has its own; lowering niceness may be forbidden."""
    thread = self._thread.native_id if threading.current_thread() is not self._thread else threading.get_native_id()
    if hasattr(os, "setpriority") and thread is not None:
      with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, niceness)
