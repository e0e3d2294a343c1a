"""Programs and compiled steps, one per set of living slices. The next topologies' are compiled in the background.

An executable is bound to its devices, so each set of slices needs its own. With N slices alive, N sets remain after the
loss of one slice.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from concurrent import futures
from dataclasses import dataclass
from functools import partial
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
  """What is known of one set of slices: its program, and its compiled step (None: not compiled yet)."""

  program: P
  step: Any = None


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
    self.others: dict[str, Any] = {}  # what `kept` has compiled
    self.compile_seconds = 0.0  # of the last step that was compiled in the foreground
    self._lock = threading.Lock()  # one topology is built at a time, and each only once; also for additions to `_jobs`
    self._pool: futures.ThreadPoolExecutor | None = None  # one thread; None: nothing was prepared yet
    self._jobs: dict[Any, futures.Future[None]] = {}  # by slices, or name in `others`
    self._thread: int | None = None  # native id of the thread

  def program(self, view: View) -> P:
    """The program for the slices of `view`, built once."""
    return self._topology(view).program

  def step(self, view: View) -> Any:
    """The compiled step of `view`: kept, compiled in the background (waits for it), or compiled now. No further
    background compilation begins: the topologies to prepare depend on the view that runs."""
    self._cancel()
    self._finish(view.slices)
    topology = self._topology(view)
    if topology.step is None:
      start = self._clock()
      topology.step = self.recorded(f"slices {list(view.slices)}", lambda: self._compile(topology.program))
      self.compile_seconds = self._clock() - start
    return topology.step

  def kept(self, what: str, compile_now: Callable[[], X]) -> X:
    """Another program than a step: what compile_now() has returned before for this name, or returns now. If it is being
    compiled in the background, waits for it."""
    self._finish(what)
    if what not in self.others:
      self.others[what] = self.recorded(what, compile_now)
    return self.others[what]

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
    topology = self.topologies.get(tuple(sorted(slices)))
    return topology is not None and topology.step is not None

  def forget_steps(self) -> None:
    """Drops all compiled programs, for the case that one of them is the cause of an unexplained error."""
    for topology in self.topologies.values():
      topology.step = None
    self.others.clear()

  def prepare(
    self, views: Iterable[View], others: Mapping[str, Callable[[], Any]], worthwhile: Callable[[], bool]
  ) -> None:
    """Compiles the steps of `views` in the background, and then what `kept` will be asked for, in this order, each if
    worthwhile() is still true. If a compilation fails, its traceback is printed, and no other follows: an attempt that
    needs the program fails in the foreground."""
    missing = [view for view in views if not self.has_step(view.slices)]
    jobs: dict[Any, Callable[[], None]] = {
      view.slices: partial(self._prepare_one, view, number, len(missing)) for number, view in enumerate(missing, 1)
    }
    jobs |= {what: partial(self._prepare_other, what, others[what]) for what in others if what not in self.others}
    if missing:
      names = ", ".join(str(list(view.slices)) for view in missing)
      self._log.detail(f"Preparing in the background the steps for slices {names}.")
    self._pool = self._pool or futures.ThreadPoolExecutor(1, "compile next topologies")
    with self._lock:  # a compilation that fails at once cancels all that follow
      for key, compile_now in jobs.items():
        if key not in self._jobs or self._jobs[key].done():  # otherwise it is under way since the last call
          self._jobs[key] = self._pool.submit(self._in_background, compile_now, worthwhile)

  def wait(self, timeout: float | None) -> bool:
    """Whether the background compilations have ended within `timeout` seconds (None: waits until they have)."""
    if timeout is None:
      self._set_niceness(0)  # on a busy machine, a thread of low priority would keep the caller waiting
    return not futures.wait(self._jobs.values(), timeout).not_done

  def close(self) -> None:
    """Begins no further compilation. Does not wait for the one under way: the interpreter's end does."""
    self._cancel()
    if self._pool is not None:
      self._pool.shutdown(wait=self.wait(0.0))
      self._pool = None

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

  def _prepare_other(self, what: str, compile_now: Callable[[], Any]) -> None:
    if what in self.others:
      return
    start = self._clock()
    with compiles.uncounted():
      self.others[what] = compile_now()
    self._events.emit("compile", what=what, seconds=self._clock() - start, background=True)

  def _in_background(self, compile_now: Callable[[], None], worthwhile: Callable[[], bool]) -> None:
    self._thread = threading.get_native_id()
    self._set_niceness(_NICENESS)
    try:
      if worthwhile():
        compile_now()
    except Exception:  # noqa: BLE001 -- an attempt that needs the program meets the error in the foreground
      traceback.print_exc()
      with self._lock:
        self._cancel()

  def _cancel(self) -> None:
    """Begins no further background compilation."""
    for job in list(self._jobs.values()):
      job.cancel()

  def _finish(self, key: Any) -> None:
    """Waits for the background compilation of `key` if it is under way; otherwise it does not begin any more."""
    job = self._jobs.get(key)
    if job is not None and not job.cancel() and not job.done():
      self._set_niceness(0)
      futures.wait([job])

  def _set_niceness(self, niceness: int) -> None:
    """Sets the priority of the compiling thread. On Linux a thread has its own; lowering niceness may be forbidden."""
    if hasattr(os, "setpriority") and self._thread is not None:
      with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, self._thread, niceness)
