"""What an attempt returns, and what lives longer than one: the Carry, whose calls are all that train.py sees.

The order of the calls in an attempt is: restored, then for every step before_step, wait, completed, wants_resize.
`step` counts completed steps: step 12 is the one after which 12 are done.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from trainer.cluster import Cluster, View
from trainer.config.faults import Moment
from trainer.config.schema import ElasticSection
from trainer.elastic import batch_plan
from trainer.elastic.events import SliceHang
from trainer.elastic.faults import FaultInjector
from trainer.elastic.policy import ResizePolicy, RetryPolicy, SnapshotPolicy
from trainer.elastic.prepare import Preparation, next_views
from trainer.observe.compiles import CompileCounter, Compiles
from trainer.observe.events import EventLog
from trainer.observe.log import Log
from trainer.observe.metrics import format_elastic_line


@dataclass(frozen=True)
class Outcome:
  """How an attempt ended in good order, and how many steps are done."""

  kind: Literal["complete", "slice_up", "preempted"]
  step: int


@dataclass(frozen=True)
class Job:
  """What the elastic loop must know of the run."""

  steps: int
  micro_batches: int  # per slice and step on the full topology
  tokens_per_step: int
  state_bytes: int  # of one full copy of parameters and optimizer state


@dataclass
class Recovery:
  """The way from one event to the next new step; becomes one `recovery` record. Times in seconds."""

  event: Literal["slice_down", "slice_up"]
  slice: list[int]
  step_before: int
  slices_before: int
  began: float
  detect_seconds: float
  compiles: Compiles
  wait_seconds: float = 0.0
  restore_seconds: float = 0.0
  compile_seconds: float = 0.0
  step_after: int = 0
  tier: str = "none"
  restored_at: float = 0.0


@dataclass
class Carry:
  """Handed from attempt to attempt. An attempt calls the methods; the fields are the elastic loop's."""

  cfg: ElasticSection
  job: Job
  cluster: Cluster
  events: EventLog
  log: Log
  faults: FaultInjector
  retries: RetryPolicy
  resizes: ResizePolicy
  snapshot_policy: SnapshotPolicy
  counter: CompileCounter
  clock: Callable[[], float] = time.monotonic
  stop: Callable[[], bool] = lambda: False  # whether the process has been asked to end
  compiled: dict[tuple[int, ...], Any] = field(default_factory=dict)  # by View.slices
  view: View = field(init=False)
  survivors: frozenset[int] = field(init=False)  # slices whose host memory has outlived the previous attempt
  down_events: int = 0
  last_step: int = 0  # completed in this process or before it
  current_step: int = 0  # under way; 0 before an attempt's first
  recoveries: list[Recovery] = field(default_factory=list)
  preparation: Preparation | None = None
  announcement: str = ""  # "Elastic attempt 2 out of 10", until it is printed
  last_sign_of_life: float = 0.0  # when the attempt began or last completed a step; a fault can have come no earlier
  _timed: bool = False  # whether last_sign_of_life is the end of a step
  _step_seconds: float = 0.0
  _compile_seconds: float = 0.0  # of the last step that was compiled in the foreground
  _told: frozenset[int] = frozenset()  # returned slices that were said not to be taken in

  def begin(self, view: View) -> None:
    """Called by the loop before each attempt."""
    self.survivors = self.cluster.survivors(self.view) if hasattr(self, "view") else frozenset(view.slices)
    self.view = view
    self.current_step = 0
    self.last_sign_of_life, self._timed = self.clock(), False

  def announce(self) -> None:
    """Prints which attempt this is, once: when a checkpoint has been found and is about to be read, as in the guides.

    `restored` does it for an attempt that reads none.
    """
    if self.announcement:
      self.log.line(self.announcement)
    self.announcement = ""

  def at(self, moment: Moment, step: int) -> None:
    """Tells the fault injector that a snapshot or a save of `step` has been started, or a state restored."""
    if moment == "snapshot":
      self.snapshot_policy.taken(step)
    self.faults.at(moment, step)

  def compiled_step(self, compile: Callable[[View], Any]) -> Any:
    """The compiled step of this attempt's view: kept, prepared in the background, or compiled now."""
    before, start = self.counter.read(), self.clock()
    if self.preparation is not None:
      self.preparation.finish(self.view)
    if self.view.slices not in self.compiled:
      self.compiled[self.view.slices] = compile(self.view)
      self._compile_seconds = self.clock() - start
      made = self.counter.read() - before
      self.events.emit(
        "compile",
        what=f"slices {list(self.view.slices)}",
        seconds=self._compile_seconds,
        cached=made.compilations == 0,
        compilations=made.compilations,
        background=False,
      )
    for recovery in self.recoveries:
      recovery.compile_seconds += self.clock() - start
    return self.compiled[self.view.slices]

  def prepare(self, compile: Callable[[View], Any]) -> None:
    """Compiles in the background for the topologies that may come next, where the run may go on with fewer slices.

    To be called when the attempt's first steps are done: they must not wait for this, and tell whether the run is
    long enough for a compilation to be of use.
    """
    if not self.cfg.elastic_enabled or self.cfg.elastic_min_slice_count == -1:
      return
    least = self.cfg.elastic_min_slice_count
    views = [view for view in next_views(self.cluster, self.view) if view.num_alive >= least]
    self.preparation = Preparation(
      compile,
      views,
      self.compiled,
      self.events,
      worth_it=lambda: self._step_seconds == 0.0 or self._seconds_left(self.last_step) > self._compile_seconds,
      after=self.preparation,
    )

  def _seconds_left(self, step: int) -> float:
    """How long the rest of the run takes from `step` at the speed of the last step; 0.0 before one was timed."""
    return (self.job.steps - step) * self._step_seconds

  def restored(self, step: int, tier: str, seconds: float) -> None:
    """The attempt has a state after `step` completed steps, from `tier` ("none": fresh), which took `seconds`."""
    self.announce()
    self.snapshot_policy.restarted()
    if self.last_step == 0:
      self.last_step = step
      self.retries.start_at(step)
    for recovery in self.recoveries:
      recovery.step_after, recovery.tier, recovery.restored_at = step, tier, self.clock()
      recovery.restore_seconds += seconds
    if self.recoveries:
      self.at("recovery", step + 1)

  def before_step(self, step: int, batch: Any) -> Any:
    """The batch to use for `step`; faults that are due happen here."""
    self.current_step = step
    self.at("step", step)
    return self.on_slices(batch)

  def on_slices(self, batch: Any) -> Any:
    """The batch as the attempt's slices get it: in error state where one of them is lost and only simulated."""
    return self.cluster.poison(batch, self.view)

  def wait(self, arrays: Any) -> None:
    """Returns when the arrays are computed; raises their error, or SliceHang when slices have gone silent."""
    seconds = self.cfg.elastic_hang_check_seconds
    if not self.cfg.elastic_enabled or seconds == 0:
      self.cluster.block_until_ready(arrays, self.view)
      return
    waiter = _Waiter(lambda: self.cluster.block_until_ready(arrays, self.view))
    while not waiter.done(seconds):
      missing = sorted(frozenset(self.view.slices) - self.cluster.alive())
      if missing:
        raise SliceHang(
          f"step {self.current_step} has not finished in {seconds:g} s and slices {missing} do not answer"
        )
      self.log.warning(f"step {self.current_step} has not finished in {seconds:g} s; all its slices answer, waiting on")

  def completed(self, step: int) -> None:
    """`step` is done, and its results are known to be good."""
    now = self.clock()
    if self._timed:  # else it holds the first run of a program
      self._step_seconds = now - self.last_sign_of_life
      self.snapshot_policy.completed(step, self._step_seconds)
    self.last_sign_of_life, self._timed = now, True
    self.last_step = step
    self.retries.completed(step)
    self.recovered()
    if self.cfg.elastic_enabled:
      self.log.detail(format_elastic_line(step, self.down_events, self.view.num_alive))

  @property
  def uses_snapshots(self) -> bool:
    """Whether the attempt takes snapshots, and restores from them first."""
    return self.cfg.elastic_enabled and self.cfg.elastic_backup_kind == "snapshot"

  def snapshot_due(self, step: int) -> bool:
    """Whether the attempt should take a snapshot of `step`."""
    return self.uses_snapshots and self.snapshot_policy.due(step)

  @property
  def keeps_snapshot_period(self) -> bool:
    """Whether the attempt waits for a slow snapshot before the next; else that one falls out."""
    return self.snapshot_policy.is_fixed

  def wants_resize(self, step: int) -> bool:
    """Whether the attempt should snapshot `step` and return Outcome("slice_up", step), to go on with more slices."""
    if not self.cfg.elastic_enabled or self.view.is_full:
      return False
    returned = self.cluster.returned(self.view)
    if not returned or not self.resizes.interval_over:
      return False
    now, then = (
      batch_plan.plan(self.cluster.num_slices, alive, self.job.micro_batches, 1).relative_throughput
      for alive in (self.view.num_alive, self.view.num_alive + len(returned))
    )
    kept = tuple(sorted({*self.view.slices, *returned})) in self.compiled
    saved_seconds = self._seconds_left(step) * (1 - now / then)
    worth_it = self.resizes.worth_it(saved_seconds, 0.0 if kept else self._compile_seconds)
    if not worth_it and returned != self._told:
      self.log.line(
        f"Slices {sorted(returned)} have returned; taking them in would save only {saved_seconds:.1f} s of the run."
      )
      self._told = returned
    return worth_it

  def interrupted(self, event: Literal["slice_down", "slice_up"], slices: list[int], began: float) -> None:
    """Called by the loop when an attempt has ended by an event that began at `began` (self.clock)."""
    now = self.clock()
    self.recoveries.append(
      Recovery(event, slices, self.last_step, self.view.num_alive, began, now - began, self.counter.read())
    )

  def recovered(self) -> None:
    """The events so far have been recovered from: a step is completed, or there is none left to do."""
    for recovery in self.recoveries:
      self._recovered(recovery, self.clock())
    self.recoveries.clear()

  def _recovered(self, recovery: Recovery, now: float) -> None:
    compilations = (self.counter.read() - recovery.compiles).compilations
    seconds = now - recovery.began
    steps_lost = recovery.step_before - recovery.step_after
    self.resizes.cost_seconds = seconds - recovery.wait_seconds - recovery.compile_seconds
    self.events.emit(
      "recovery",
      event=recovery.event,
      slice=recovery.slice,
      step_before=recovery.step_before,
      step_after=recovery.step_after,
      steps_lost=steps_lost,
      tokens_lost=steps_lost * self.job.tokens_per_step,
      slices_before=recovery.slices_before,
      slices_after=self.view.num_alive,
      detect_seconds=recovery.detect_seconds,
      wait_seconds=recovery.wait_seconds,
      restore_seconds=recovery.restore_seconds,
      compile_seconds=recovery.compile_seconds,
      first_step_seconds=now - recovery.restored_at,
      seconds=seconds,
      tier=recovery.tier,
      compilations=compilations,
    )
    self.log.line(
      f"Recovered from {recovery.event} of slice {', '.join(map(str, recovery.slice)) or '?'} in {seconds:.2f} s: "
      f"{recovery.slices_before} -> {self.view.num_alive} slices, {steps_lost} completed steps lost, restored from "
      f"{recovery.tier}, {compilations} compilations"
    )


class _Waiter:
  """Runs a blocking call in a thread, so that the caller can look up from it."""

  def __init__(self, call: Callable[[], None]) -> None:
    self._call = call
    self._error: BaseException | None = None
    self._thread = threading.Thread(target=self._run, name="wait-for-step", daemon=True)
    self._thread.start()

  def done(self, timeout: float) -> bool:
    """Whether the call has returned within `timeout` seconds; raises what it raised."""
    self._thread.join(timeout)
    if self._thread.is_alive():
      return False
    if self._error is not None:
      raise self._error
    return True

  def _run(self) -> None:
    try:
      self._call()
    except BaseException as error:  # noqa: BLE001 -- raised again by done()
      self._error = error
