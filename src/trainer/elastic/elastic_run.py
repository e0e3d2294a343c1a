"""What an attempt returns, and what the elastic loop keeps from attempt to attempt.

`step` counts completed steps: step 12 is the one after which 12 are done.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trainer.cluster import Cluster, View
from trainer.config.faults import Fault, Moment
from trainer.config.schema import ElasticSection
from trainer.elastic import batch_plan, wait
from trainer.elastic.classification import Event, Kind
from trainer.elastic.fault_injector import FaultInjector
from trainer.elastic.policy import ResizePolicy, RetryPolicy, SnapshotPolicy
from trainer.elastic.program_cache import ProgramCache, next_views
from trainer.elastic.recovery import RecoveryLog
from trainer.observe.events import EventLog, read_events
from trainer.observe.log import Log
from trainer.observe.metrics import format_elastic_line
from worlds.peers import Change

_RESET_STEPS = 10  # completed steps after which the count of attempts is reset
_SNAPSHOT_OVERHEAD = 0.01  # largest share of the step time that snapshots may cost


@dataclass(frozen=True)
class Outcome:
  """How an attempt ended in good order, and how many steps are done."""

  kind: Literal["complete", "slice_up", "preempted"]
  step: int


class ElasticRun:
  """What the elastic loop keeps from attempt to attempt, and what it decides."""

  def __init__(
    self,
    cfg: ElasticSection,
    cluster: Cluster,
    log: Log,
    events: EventLog,
    programs: ProgramCache[Any],
    faults: Sequence[Fault] = (),
    *,
    steps: int,
    units: int,
    tokens_per_step: int,
    state_bytes: int,
    clock: Callable[[], float] = time.monotonic,
  ) -> None:
    """faults: of `retry.check`. steps: of the run. units: of work of a slice and step on the full topology, see
    batch_plan. state_bytes: of one full copy of parameters and optimizer state."""
    self.cfg, self.cluster, self.log, self.events, self.programs = cfg, cluster, log, events, programs
    self.total_steps, self._units, self.clock = steps, units, clock
    self.faults = _injector(cluster, list(faults), events, clock)
    self.retries = RetryPolicy(cfg.elastic_max_retries, _RESET_STEPS)
    self.resizes = ResizePolicy(cfg.elastic_min_resize_interval_seconds, clock)
    self.snapshot_policy = SnapshotPolicy(max(cfg.snapshot_period, 0), _SNAPSHOT_OVERHEAD, state_bytes)
    self.recovery = RecoveryLog(events, log, programs.counter, tokens_per_step, clock)
    self.last_step = 0  # completed in this process or before it
    self.current_step = 0  # under way; 0 before an attempt's first
    # When the attempt began or last completed work of all slices; no fault came earlier.
    self.last_progress_at = 0.0
    self.step_seconds = 0.0  # of the last completed step, without evaluations and saves; 0: no step was timed
    self.down_events = 0
    self._is_first_step = True  # the attempt has completed no step yet
    self._waits_since: float | None = None  # for slices, on the clock
    self._announcement = ""  # "Elastic attempt 2 out of 10", until it is printed
    self._shown = 0, 0  # down_events and living slices of the last line about them
    self._declined: frozenset[int] = frozenset()  # returned slices that the log said would not be used

  def begin_attempt(self) -> None:
    self.current_step, self._is_first_step = 0, True
    self.last_progress_at = self.clock()

  def announce_next_attempt(self) -> None:
    """Another attempt follows a failed one; `announce` prints its number."""
    self._announcement = f"Elastic attempt {self.retries.attempt} out of {self.cfg.elastic_max_retries}"

  def announce(self) -> None:
    """Prints which attempt this is, once: when a checkpoint is about to be read, as in the guides, or in `restored`."""
    if self._announcement:
      self.log.line(self._announcement)
    self._announcement = ""

  def begin_step(self, step: int) -> None:
    """`step` is under way: faults that are due happen now."""
    self.current_step = step
    self.inject_faults("step", step)

  def join(self, down_events: int) -> None:
    """This process joins a run that has had so many losses of slices."""
    self.down_events = down_events

  def waits_on(
    self,
    view: View,
    late_after: Callable[[], float | None] = lambda: None,
    stop: Callable[[], bool] = lambda: False,
  ) -> wait.Wait:
    """The waits of an attempt on `view`. late_after, stop: see `Wait`."""
    seconds = wait.CHECK_SECONDS if self.cfg.elastic_enabled and self.cluster.recovers_in_process else 0.0
    return wait.Wait(self.cluster, view, seconds, self.cfg.elastic_timeout_seconds, self.log, late_after, stop)

  def inject_faults(self, moment: Moment, step: int) -> None:
    """`moment` of `step` has come: faults that are due happen now."""
    if moment == "step" and self.faults.waits(step):
      if not self.programs.wait(0.0):
        self.log.line(f"A rehearsed fault waits before step {step} until the other steps are prepared.")
        began = self.clock()
        self.programs.wait(None)
        self.events.emit("rehearsal_wait", step=step, seconds=self.clock() - began)
      self.faults.at("prepared", step)
    self.faults.at(moment, step)

  def restored(self, step: int, tier: str, seconds: float) -> None:
    """The attempt has a state after `step` completed steps, from `tier` ("none": fresh), which took `seconds`."""
    self.announce()
    self.snapshot_policy.restarted()
    if self.last_step == 0:
      self.last_step = step
      self.retries.start_at(step)
    self.recovery.restored(step, tier, seconds)
    self.inject_faults("recovery" if self.recovery.under_way else "restore", step + 1)

  @property
  def fewest_slices(self) -> int:
    """How many slices must be alive for a step."""
    fewest = self.cfg.elastic_min_slice_count
    return self.cluster.num_slices if fewest == -1 else fewest

  def begin_wait(self) -> None:
    self._waits_since = self.clock()

  def end_wait(self, alive: Collection[int]) -> None:
    """Records the wait that `begin_wait` began, if there is one. alive: the slices that are alive now."""
    if self._waits_since is not None:
      seconds, self._waits_since = self.clock() - self._waits_since, None
      self.recovery.waited(seconds)
      self.events.emit("wait_slices", seconds=seconds, wanted=self.fewest_slices, alive=sorted(alive))

  @contextlib.contextmanager
  def evaluating(self) -> Iterator[None]:
    """An evaluation on all slices is under way in the block."""
    with self.recovery.paused():
      yield
    self.last_progress_at = self.clock()

  def completed(self, step: int, seconds: float, alive: int) -> None:
    """`step` is done on `alive` slices in `seconds`, and its results are recorded."""
    self.last_step, self.last_progress_at = step, self.clock()
    if not self._is_first_step:  # which also starts a program
      self.step_seconds = seconds
      self.snapshot_policy.completed(step, seconds)
    self._is_first_step = False
    self.retries.completed(step)
    self.recovered(alive)
    if self.cfg.elastic_enabled and (counts := (self.down_events, alive)) != self._shown:
      self.log.detail(format_elastic_line(step, *counts))
      self._shown = counts

  def recovered(self, alive: int) -> None:
    """The events so far have been recovered from: a step is completed on `alive` slices, or no step is left to do."""
    cost = self.recovery.finish(alive)
    if cost is not None:
      self.resizes.recovered(cost)

  def lose(self, event: Event, alive: Collection[int], began: float, *, before: int, step: int) -> None:
    """Slices were lost after `step` by a fault at `began`. alive: the slices that are left; before: how many
    computed."""
    lost = sorted(event.lost)
    detect_seconds = self.clock() - began
    if event.kind is Kind.HANG:
      self.events.emit("hang", step=step, silent_seconds=detect_seconds)
    self.events.emit(
      "slice_down", step=step, slice=lost, slices=sorted(alive), error=event.reason, detect_seconds=detect_seconds
    )
    self.down_events += 1
    self.recovery.begin("slice_down", lost, began, step=step, alive=before)
    self.resizes.resized()
    names = f"slice {', '.join(map(str, lost))}" if lost else "a slice"
    line = f"Slice down event detected. Retrying. Lost after step {step}: {names} ({event.reason})."
    self.log.line(line)

  def grow(self, returned: list[int], alive: Collection[int], *, before: int, step: int) -> None:
    """Records that the run continues after `step` with slices that have returned. before: how many computed."""
    self.recovery.begin("slice_up", returned, self.clock(), step=step, alive=before)
    self.retries.resized()
    self.events.emit("slice_up", step=step, slice=returned, slices=sorted(alive))
    self.log.line(f"Slice up event: slices {returned} have returned. Continuing with them after step {step}.")

  def members_changed(self, change: Change, step: int) -> None:
    """Records that other slices compute after `step`, where slices are processes: with the log lines and events of a
    new attempt, although the attempt goes on."""
    self.end_wait(change.members)
    self.events.begin_epoch(change.epoch)
    for member, (reason, seconds_ago) in change.lost.items():
      event = Event(Kind.SLICE_DOWN, reason, frozenset({member}))
      self.lose(event, change.members, self.clock() - seconds_ago, before=change.before, step=step)
      self.log.line(f"Elastic attempt {change.attempt} out of {self.cfg.elastic_max_retries}")
    if change.joined:
      self.grow(list(change.joined), change.members, before=change.before, step=step)
    if change.holds:
      self.begin_wait()
      self.log.line(
        f"{len(change.members)} of {self.cluster.num_slices} slices are alive and elastic_min_slice_count="
        f"{self.cfg.elastic_min_slice_count}: waiting for the others, with the state of step {step} in memory."
      )
    self.recovery.restored(step, "memory", 0.0)

  @property
  def uses_snapshots(self) -> bool:
    """Whether attempts take snapshots, and restore from them first."""
    snapshots = self.cfg.elastic_enabled and self.cfg.snapshot_period != -1
    return snapshots and self.cluster.recovers_in_process

  def snapshot_due(self, step: int) -> bool:
    return self.uses_snapshots and self.snapshot_policy.due(step)

  def resize_due(self, view: View, step: int) -> bool:
    """Whether the attempt on `view` should end after `step`, to go on with slices that have returned."""
    if not self.cfg.elastic_enabled or view.is_full:
      return False
    returned = self.cluster.returned(view)
    if not returned or not self.resizes.interval_over:
      return False
    now, then = (
      batch_plan.relative_throughput(self.cluster.num_slices, alive, self._units)
      for alive in (view.num_alive, view.num_alive + len(returned))
    )
    saved_seconds = self._seconds_left(step) * (1 - now / then)
    programs = self.programs
    compile_seconds = 0.0 if programs.has_step({*view.slices, *returned}) else programs.compile_seconds
    worthwhile = self.resizes.worthwhile(saved_seconds, compile_seconds)
    if not worthwhile and self.step_seconds and returned != self._declined:
      self.log.line(
        f"Slices {sorted(returned)} have returned. Using them would save only {saved_seconds:.1f} s of the run, so the "
        "run goes on without them."
      )
      self._declined = returned
    return worthwhile

  def compiled_step(self, view: View) -> Any:
    """The compiled step of `view`. Records how long the attempt waited for it."""
    start = self.clock()
    compiled = self.programs.step(view)
    self.recovery.compiled(self.clock() - start)
    return compiled

  def prepare_steps(
    self, view: View, others: Callable[[View], Mapping[str, Callable[[], Any]]] = lambda view: {}
  ) -> None:
    """Compiles in the background for the topologies that may come next, if the run may go on with fewer slices.

    others: {name: compilation} of the other programs of a view, see `ProgramCache.kept`. Call this method after an
    attempt's first steps: they must not wait for it, and tell whether the run is long enough for it.
    """
    fewest = self.cfg.elastic_min_slice_count
    if not self.cfg.elastic_enabled or fewest == -1:
      return
    views = [next_view for next_view in next_views(self.cluster, view) if next_view.num_alive >= fewest]
    more = {what: compile_now for next_view in views for what, compile_now in others(next_view).items()}
    self.programs.prepare(views, more, self._long_enough_to_compile)

  def _seconds_left(self, step: int) -> float:
    """How long the rest of the run takes from `step` at the speed of the last step; 0.0 before a step was timed."""
    return (self.total_steps - step) * self.step_seconds

  def _long_enough_to_compile(self) -> bool:
    if self.faults.waits(self.total_steps):
      return True
    return self.step_seconds == 0.0 or self._seconds_left(self.last_step) > self.programs.compile_seconds


def _injector(cluster: Cluster, faults: list[Fault], events: EventLog, clock: Callable[[], float]) -> FaultInjector:
  """The injector of those `faults` that no earlier process of this run has injected."""
  if faults and events.run_directory is not None:
    before = [record.get("fault") for record in read_events(events.run_directory) if record["kind"] == "fault_injected"]
    for fault in list(faults):
      if str(fault) in before and not fault.sticky:
        before.remove(str(fault))
        faults.remove(fault)

  def record(fault: Fault, step: int) -> None:
    events.emit("fault_injected", slice=fault.slice, fault=str(fault), step=step)
    events.flush()  # the next thing may be SIGKILL

  return FaultInjector(faults, cluster.fault_target, record, clock=clock, acts=lambda: cluster.is_primary)
