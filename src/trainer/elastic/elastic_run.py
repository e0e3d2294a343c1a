"""What an attempt returns, and what the elastic loop keeps from attempt to attempt.

`step` counts completed steps: step 12 is the one after which 12 are done.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from trainer.cluster import Cluster, View
from trainer.config.faults import Moment
from trainer.config.schema import ElasticSection
from trainer.elastic import batch_plan, hang
from trainer.elastic.events import Event, Kind
from trainer.elastic.faults import FaultInjector
from trainer.elastic.policy import ResizePolicy, RetryPolicy, SnapshotPolicy
from trainer.elastic.program_cache import ProgramCache, next_views
from trainer.elastic.recovery import RecoveryLog
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
  units: int  # of work of a slice and step on the full topology: see batch_plan
  tokens_per_step: int
  state_bytes: int  # of one full copy of parameters and optimizer state


class Shared(Protocol):
  """What the elastic loop uses of the session, which outlives an attempt too."""

  cluster: Cluster
  log: Log
  events: EventLog
  programs: ProgramCache[Any]


@dataclass
class StepClock:
  """Which step is done, which one is under way, and how long one step takes."""

  total_steps: int
  clock: Callable[[], float]
  last_step: int = 0  # completed in this process or before it
  current_step: int = 0  # under way; 0 before an attempt's first
  last_progress_at: float = 0.0  # when the attempt began or last completed work of all slices; no fault came earlier
  step_seconds: float = 0.0  # of the last completed step, without evaluations and saves; 0: no step was timed
  _first: bool = field(default=True)  # whether the attempt has completed no step yet

  def resume(self, step: int) -> bool:
    """The state after `step` is restored. Returns whether this process knew of no completed step before."""
    first = self.last_step == 0
    self.last_step = self.last_step or step
    return first

  def begin(self, step: int) -> None:
    """`step` is under way."""
    self.current_step = step

  def begin_attempt(self) -> None:
    self.current_step = 0
    self.last_progress_at, self._first = self.clock(), True

  def complete(self, step: int, seconds: float) -> bool:
    """`step` is done and took `seconds`. Returns whether that counts: an attempt's first step also starts a program."""
    self.last_step, self.last_progress_at = step, self.clock()
    timed, self._first = not self._first, False
    if timed:
      self.step_seconds = seconds
    return timed

  def seconds_left(self, step: int) -> float:
    """How long the rest of the run takes from `step` at the speed of the last step; 0.0 before one was timed."""
    return (self.total_steps - step) * self.step_seconds


@dataclass
class ElasticRun:
  """The parts that outlive an attempt. The elastic loop makes them once and hands them to every attempt."""

  cfg: ElasticSection
  job: Job
  session: Shared
  faults: FaultInjector
  retries: RetryPolicy
  resizes: ResizePolicy
  snapshot_policy: SnapshotPolicy
  recovery: RecoveryLog
  clock: Callable[[], float] = time.monotonic
  steps: StepClock = field(init=False)
  down_events: int = 0
  _waits_since: float | None = None  # for slices, on the clock
  _announcement: str = ""  # "Elastic attempt 2 out of 10", until it is printed
  _shown: tuple[int, int] = (0, 0)  # down_events and living slices of the last line about them
  _declined: frozenset[int] = frozenset()  # returned slices that the log said would not be used

  def __post_init__(self) -> None:
    self.steps = StepClock(self.job.steps, self.clock)

  def announce_next_attempt(self) -> None:
    """Another attempt follows a failed one; `announce` prints its number."""
    self._announcement = f"Elastic attempt {self.retries.attempt} out of {self.cfg.elastic_max_retries}"

  def announce(self) -> None:
    """Prints which attempt this is, once: when a checkpoint is about to be read, as in the guides, or in `restored`."""
    if self._announcement:
      self.session.log.line(self._announcement)
    self._announcement = ""

  def begin_step(self, step: int) -> None:
    """`step` is under way: faults that are due happen now."""
    self.steps.begin(step)
    self.inject_faults("step", step)

  def join(self, down_events: int) -> None:
    """This process joins a run that has had so many losses of slices."""
    self.down_events = down_events

  def guard(self, view: View, late_after: Callable[[], float | None] = lambda: None) -> hang.HangGuard:
    """The waits of an attempt on `view`. late_after: seconds after which the work under way is late; None: unknown."""
    seconds = hang.CHECK_SECONDS if self.cfg.elastic_enabled else 0.0
    cluster, log = self.session.cluster, self.session.log
    return hang.HangGuard(cluster, view, seconds, self.cfg.elastic_timeout_seconds, log, late_after)

  def inject_faults(self, moment: Moment, step: int) -> None:
    """`moment` of `step` has come: faults that are due happen now."""
    if moment == "step" and self.faults.waits(step):
      if not self.session.programs.wait(0.0):
        self.session.log.line(f"A rehearsed fault waits before step {step} until the other steps are prepared.")
        began = self.clock()
        self.session.programs.wait(None)
        self.session.events.emit("rehearsal_wait", step=step, seconds=self.clock() - began)
      self.faults.at("prepared", step)
    self.faults.at(moment, step)

  def restored(self, step: int, tier: str, seconds: float) -> None:
    """The attempt has a state after `step` completed steps, from `tier` ("none": fresh), which took `seconds`."""
    self.announce()
    self.snapshot_policy.restarted()
    if self.steps.resume(step):
      self.retries.start_at(step)
    self.recovery.restored(step, tier, seconds)
    self.inject_faults("recovery" if self.recovery.under_way else "restore", step + 1)

  @property
  def fewest_slices(self) -> int:
    """How many slices must be alive for a step."""
    fewest = self.cfg.elastic_min_slice_count
    return self.session.cluster.num_slices if fewest == -1 else fewest

  def begin_wait(self) -> None:
    """The run waits for slices from now on."""
    self._waits_since = self.clock()

  def end_wait(self, alive: Collection[int]) -> None:
    """Records the wait that `begin_wait` began, if there is one. alive: the slices that are alive now."""
    if self._waits_since is not None:
      seconds, self._waits_since = self.clock() - self._waits_since, None
      self.recovery.waited(seconds)
      self.session.events.emit("wait_slices", seconds=seconds, wanted=self.fewest_slices, alive=sorted(alive))

  @contextlib.contextmanager
  def evaluating(self) -> Iterator[None]:
    """An evaluation on all slices is under way in the block."""
    with self.recovery.paused():
      yield
    self.steps.last_progress_at = self.clock()

  def completed(self, step: int, seconds: float, alive: int) -> None:
    """`step` is done on `alive` slices in `seconds`, and its results are recorded."""
    if self.steps.complete(step, seconds):
      self.snapshot_policy.completed(step, seconds)
    self.retries.completed(step)
    self.recovered(alive)
    if self.cfg.elastic_enabled and (counts := (self.down_events, alive)) != self._shown:
      self.session.log.detail(format_elastic_line(step, *counts))
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
      self.session.events.emit("hang", step=step, silent_seconds=detect_seconds)
    self.session.events.emit(
      "slice_down", step=step, slice=lost, slices=sorted(alive), error=event.reason, detect_seconds=detect_seconds
    )
    self.down_events += 1
    self.recovery.begin("slice_down", lost, began, step=step, alive=before)
    self.resizes.resized()
    names = f"slice {', '.join(map(str, lost))}" if lost else "a slice"
    line = f"Slice down event detected. Retrying. Lost after step {step}: {names} ({event.reason})."
    self.session.log.line(line)

  def grow(self, returned: list[int], alive: Collection[int], *, before: int, step: int) -> None:
    """Records that the run continues after `step` with slices that have returned. before: how many computed."""
    self.recovery.begin("slice_up", returned, self.clock(), step=step, alive=before)
    self.retries.resized()
    self.session.events.emit("slice_up", step=step, slice=returned, slices=sorted(alive))
    self.session.log.line(f"Slice up event: slices {returned} have returned. Continuing with them after step {step}.")

  @property
  def uses_snapshots(self) -> bool:
    """Whether attempts take snapshots, and restore from them first."""
    snapshots = self.cfg.elastic_enabled and self.cfg.snapshot_period != -1
    return snapshots and self.session.cluster.recovers_in_process

  def snapshot_due(self, step: int) -> bool:
    """Whether the attempt should take a snapshot of `step`."""
    return self.uses_snapshots and self.snapshot_policy.due(step)

  def resize_due(self, view: View, step: int) -> bool:
    """Whether the attempt on `view` should end after `step`, to go on with slices that have returned."""
    if not self.cfg.elastic_enabled or view.is_full:
      return False
    returned = self.session.cluster.returned(view)
    if not returned or not self.resizes.interval_over:
      return False
    now, then = (
      batch_plan.relative_throughput(self.session.cluster.num_slices, alive, self.job.units)
      for alive in (view.num_alive, view.num_alive + len(returned))
    )
    saved_seconds = self.steps.seconds_left(step) * (1 - now / then)
    programs = self.session.programs
    compile_seconds = 0.0 if programs.has_step({*view.slices, *returned}) else programs.compile_seconds
    worthwhile = self.resizes.worthwhile(saved_seconds, compile_seconds)
    if not worthwhile and self.steps.step_seconds and returned != self._declined:
      self.session.log.line(
        f"Slices {sorted(returned)} have returned. Using them would save only {saved_seconds:.1f} s of the run, so the "
        "run goes on without them."
      )
      self._declined = returned
    return worthwhile

  def compiled_step(self, view: View) -> Any:
    """The compiled step of `view`. Records how long the attempt waited for it."""
    start = self.clock()
    compiled = self.session.programs.step(view)
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
    views = [next_view for next_view in next_views(self.session.cluster, view) if next_view.num_alive >= fewest]
    more = {what: compile_now for next_view in views for what, compile_now in others(next_view).items()}
    self.session.programs.prepare(views, more, self._long_enough_to_compile)

  def _long_enough_to_compile(self) -> bool:
    steps = self.steps
    if self.faults.waits(self.job.steps):
      return True
    return steps.step_seconds == 0.0 or steps.seconds_left(steps.last_step) > self.session.programs.compile_seconds
