"""The way from an elastic event to the next new step, in numbers: one `recovery` record in events.jsonl per event."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from trainer.observe.compiles import CompileCounter
from trainer.observe.events import EventLog
from trainer.observe.log import Log

ElasticEvent = Literal["slice_down", "slice_up"]


@dataclass
class _Recovery:
  """One event that has not been recovered from yet. Times in seconds."""

  event: ElasticEvent
  slices: list[int]
  step_before: int
  slices_before: int
  began: float
  detect_seconds: float
  compilations_before: int
  wait_seconds: float = 0.0
  restore_seconds: float = 0.0
  compile_seconds: float = 0.0
  step_after: int = 0
  tier: str = "none"
  restored_at: float = 0.0


class RecoveryLog:
  """Collects what each part of a recovery took. Several events may be open: a slice may be lost during a recovery."""

  def __init__(
    self, events: EventLog, log: Log, counter: CompileCounter, tokens_per_step: int, clock: Callable[[], float]
  ) -> None:
    self._events, self._log, self._counter = events, log, counter
    self._tokens_per_step = tokens_per_step
    self._clock = clock
    self._open: list[_Recovery] = []

  @property
  def under_way(self) -> bool:
    return bool(self._open)

  def begin(self, event: ElasticEvent, slices: list[int], began: float, *, step: int, alive: int) -> None:
    """An attempt on `alive` slices has ended after `step` by an event of `slices` that began at `began`."""
    detect_seconds = self._clock() - began
    self._open.append(_Recovery(event, slices, step, alive, began, detect_seconds, self._counter.compilations))

  def waited(self, seconds: float) -> None:
    for recovery in self._open:
      recovery.wait_seconds += seconds

  def compiled(self, seconds: float) -> None:
    for recovery in self._open:
      recovery.compile_seconds += seconds

  def restored(self, step: int, tier: str, seconds: float) -> None:
    """The attempt has a state after `step` completed steps, from `tier` ("none": fresh), which took `seconds`."""
    for recovery in self._open:
      recovery.step_after, recovery.tier, recovery.restored_at = step, tier, self._clock()
      recovery.restore_seconds += seconds

  @contextlib.contextmanager
  def paused(self) -> Iterator[None]:
    """The block does other work with the restored state, such as an evaluation. The open recoveries include neither its
    compilations nor its time. If the block fails, its time counts, because it is lost. For an event inside the block,
    the time from `restored` to the end of the block does not count."""
    start, before = self._clock(), self._counter.compilations
    try:
      yield
      now = self._clock()
      for recovery in self._open:
        seconds = now - max(start, recovery.restored_at)
        recovery.began += seconds
        recovery.restored_at += seconds
    finally:
      for recovery in self._open:
        recovery.compilations_before += self._counter.compilations - max(before, recovery.compilations_before)

  def finish(self, alive: int) -> float | None:
    """The events so far are recovered from: a step is completed on `alive` slices, or no step is left. Returns the
    seconds of the last recovery, without detecting the loss, waiting for slices and compiling; None: nothing was
    open."""
    cost = None
    for recovery in self._open:
      cost = self._finish(recovery, alive)
    self._open.clear()
    return cost

  def _finish(self, recovery: _Recovery, alive: int) -> float:
    now = self._clock()
    seconds = now - recovery.began
    compilations = self._counter.compilations - recovery.compilations_before
    steps_lost = recovery.step_before - recovery.step_after
    self._events.emit(
      "recovery",
      event=recovery.event,
      slice=recovery.slices,
      step_before=recovery.step_before,
      step_after=recovery.step_after,
      steps_lost=steps_lost,
      tokens_lost=steps_lost * self._tokens_per_step,
      slices_before=recovery.slices_before,
      slices_after=alive,
      detect_seconds=recovery.detect_seconds,
      wait_seconds=recovery.wait_seconds,
      restore_seconds=recovery.restore_seconds,
      compile_seconds=recovery.compile_seconds,
      first_step_seconds=now - recovery.restored_at,
      seconds=seconds,
      tier=recovery.tier,
      compilations=compilations,
    )
    self._log.line(
      f"Recovered from {recovery.event} of slice {', '.join(map(str, recovery.slices)) or '?'} in {seconds:.2f} s: "
      f"{recovery.slices_before} -> {alive} slices, {steps_lost} completed steps lost, restored from "
      f"{recovery.tier}, {compilations} compilations"
    )
    return seconds - recovery.detect_seconds - recovery.wait_seconds - recovery.compile_seconds
