"""The one loop around attempts, and the only place that catches errors of the runtime."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable

import jax

from trainer.cluster import Cluster, View
from trainer.cluster.simulated import SimulatedCluster
from trainer.config.errors import ConfigError
from trainer.config.faults import Fault, parse
from trainer.config.schema import ElasticSection
from trainer.elastic.attempt import Carry, Job, Outcome
from trainer.elastic.events import Event, Kind, classify
from trainer.elastic.faults import FaultInjector, expand
from trainer.elastic.policy import ResizePolicy, RetryPolicy, SnapshotPolicy
from trainer.observe.compiles import CompileCounter
from trainer.observe.events import EventLog, read_events
from trainer.observe.log import Log

Attempt = Callable[[View, Carry], Outcome]


def elastic_retry(
  attempt: Attempt,
  cluster: Cluster,
  cfg: ElasticSection,
  events: EventLog,
  log: Log,
  *,
  job: Job,
  stop: Callable[[], bool] = lambda: False,
  clock: Callable[[], float] = time.monotonic,
  sleep: Callable[[float], None] = time.sleep,
) -> Outcome:
  """Calls attempt(view, carry) until it is complete or preempted, on the slices that live, and returns its outcome.

  Without elastic_enabled that is one attempt on all slices. Errors that are no lost slice are raised untouched, with
  a note that says why they were not retried. Once stop() (asked while nothing runs) is true, no more slices are waited
  for: the attempt gets those that live, to save what they hold.

  Raises:
    ConfigError: what `check` would have raised; before the first attempt.
    TimeoutError: too few slices within elastic_timeout_seconds.
  """
  faults = check(cluster, cfg, job.steps)
  with CompileCounter() as counter:
    carry = Carry(
      cfg,
      job,
      cluster,
      events,
      log,
      _injector(cluster, faults, events, clock),
      RetryPolicy(cfg.elastic_max_retries, cfg.elastic_retry_reset_steps, cfg.elastic_backoff_seconds),
      ResizePolicy(cfg.elastic_min_resize_interval_seconds, clock),
      SnapshotPolicy(cfg.snapshot_period, cfg.snapshot_max_overhead, job.state_bytes),
      counter,
      clock,
      stop,
    )
    try:
      if cfg.elastic_enabled:
        outcome = _loop(attempt, carry, sleep)
      else:
        outcome = _run(attempt, carry, cluster.view(cluster.slices), number=1)
    finally:
      if carry.preparation is not None:
        carry.preparation.cancel()
    if carry.faults.faults and outcome.kind == "complete":
      log.warning(f"these faults of fault_injection never happened: {', '.join(map(str, carry.faults.faults))}")
    return outcome


def _loop(attempt: Attempt, carry: Carry, sleep: Callable[[float], None]) -> Outcome:
  cfg, cluster, log = carry.cfg, carry.cluster, carry.log
  needed = cluster.num_slices if cfg.elastic_min_slice_count == -1 else cfg.elastic_min_slice_count
  log.line("Elastic utils: Elastic training enabled.")
  log.line("Elastic Retry Enabled")
  unknown_at = -1  # step at which the last unexplained error came
  number = 0
  while True:
    number += 1
    if (view := _wait(carry, needed)) is None:
      log.line("Asked to end while no slice lives: what is newer than the last checkpoint is lost.")
      return Outcome("preempted", carry.last_step)
    try:
      outcome = _run(attempt, carry, view, number)
    except Exception as error:
      carry.announce()  # of an attempt that ended before it had a state
      event = classify(error, cluster, view)
      carry.events.emit("attempt_end", step=carry.last_step, outcome=_outcome(event))
      pause = _judge(event, carry, unknown_at)
      if pause is None:
        error.add_note(f"not retried: {event.reason} ({event.kind}, attempt {carry.retries.attempt})")
        raise
      unknown_at = carry.current_step if event.kind is Kind.UNKNOWN else -1
      traceback.clear_frames(error.__traceback__)  # they hold the dead attempt's arrays
    else:
      carry.events.emit("attempt_end", step=outcome.step, outcome=outcome.kind)
      if outcome.kind != "slice_up":
        carry.recovered()
        return outcome
      pause = 0.0
      _grow(carry, outcome)
      continue
    carry.announcement = f"Elastic attempt {carry.retries.attempt} out of {cfg.elastic_max_retries}"
    if pause:
      log.line(f"No progress since the last event; pausing {pause:g} s.")
      _pause(pause, carry, sleep)


def _pause(seconds: float, carry: Carry, sleep: Callable[[float], None]) -> None:
  end = carry.clock() + seconds
  while (left := end - carry.clock()) > 0 and not carry.stop():
    sleep(min(left, 1.0))


def _wait(carry: Carry, needed: int) -> View | None:
  """The view of the next attempt, as soon as `needed` slices live; once the run is to end, of those that do, if any."""
  start = carry.clock()
  alive = carry.cluster.wait_for(needed, carry.cfg.elastic_timeout_seconds, carry.stop)
  seconds = carry.clock() - start
  for recovery in carry.recoveries:
    recovery.wait_seconds += seconds
  if carry.recoveries:
    carry.events.emit("wait_slices", seconds=seconds, wanted=needed, alive=sorted(alive))
  return carry.cluster.view(alive) if alive else None


def _run(attempt: Attempt, carry: Carry, view: View, number: int) -> Outcome:
  carry.begin(view)
  carry.events.emit("attempt_start", attempt=number, step=carry.last_step, slices=list(view.slices))
  # Arrays that are not placed explicitly must not go to a dead slice's device.
  with jax.default_device(view.devices[0][0]):
    return attempt(view, carry)


def _judge(event: Event, carry: Carry, unknown_at: int) -> float | None:
  """Seconds to pause before the next attempt; None: there will be none."""
  log, view = carry.log, carry.view
  if event.is_slice_loss:
    survivors = carry.cluster.survivors(view)
    lost = sorted(frozenset(view.slices) - survivors)
    began = max(carry.last_sign_of_life, carry.faults.last_fired_at)  # nobody knows when a real one began
    detect = carry.clock() - began
    if event.kind is Kind.HANG:
      carry.events.emit("hang", step=carry.last_step, silent_seconds=detect)
    carry.events.emit(
      "slice_down",
      step=carry.last_step,
      slice=lost,
      slices=sorted(survivors),
      error=event.reason,
      detect_seconds=detect,
    )
    carry.down_events += 1
    carry.interrupted("slice_down", lost, began)
    carry.resizes.resized()
    log.line("Slice down event detected. Retrying.")
  elif event.kind is Kind.UNKNOWN and carry.current_step != unknown_at:
    log.warning(f"step {carry.current_step} failed for an unknown reason ({event.reason}); trying it once more")
    carry.compiled.clear()  # in case the reason is a step that was compiled for a slice's earlier life
  else:
    return None
  return carry.retries.failed()


def _grow(carry: Carry, outcome: Outcome) -> None:
  returned = sorted(carry.cluster.returned(carry.view))
  carry.interrupted("slice_up", returned, carry.clock())
  carry.resizes.resized()
  carry.retries.resized()
  carry.events.emit("slice_up", step=outcome.step, slice=returned, slices=sorted(carry.cluster.alive()))
  carry.log.line(f"Slice up event: slices {returned} have returned. Going on with them after step {outcome.step}.")


def _outcome(event: Event) -> str:
  return "slice_down" if event.is_slice_loss else "failed"


def check(cluster: Cluster, cfg: ElasticSection, steps: int) -> list[Fault]:
  """The faults of a run of `steps` steps. Raises ConfigError where cluster and elastic keys do not fit each other."""
  if cfg.elastic_enabled and cluster.world.size > 1:
    raise ConfigError(
      f"elastic_enabled=true: the {cluster.world.size} processes of this run share one JAX world, which cannot lose "
      "any of them.\nUse one process (cluster=pathways or simulated), or elastic_enabled=false."
    )
  if cfg.elastic_enabled and cfg.elastic_min_slice_count > cluster.num_slices:
    raise ConfigError(
      f"elastic_min_slice_count={cfg.elastic_min_slice_count}: there are only {cluster.num_slices} slices.\n"
      f"Use at most {cluster.num_slices}, or -1 for all."
    )
  faults = expand(parse(cfg.fault_injection), cluster.num_slices, steps)
  if any(fault.slice is not None for fault in faults) and not isinstance(cluster, SimulatedCluster):
    raise ConfigError(
      f"fault_injection={cfg.fault_injection}: slices of a {cluster.kind} cluster cannot be lost by us.\nDelete a "
      "worker pod there, or rehearse with cluster=simulated."
    )
  return faults


def _injector(cluster: Cluster, faults: list[Fault], events: EventLog, clock: Callable[[], float]) -> FaultInjector:
  """What still has to be made of the run's `faults` in this process: a fault happens once per run, not per process."""
  if faults and events.directory is not None:
    before = [record["fault"] for record in read_events(events.directory) if record["kind"] == "fault_injected"]
    for fault in list(faults):
      if str(fault) in before:
        before.remove(str(fault))
        faults.remove(fault)

  def record(fault: Fault, step: int) -> None:
    events.emit("fault_injected", slice=fault.slice, fault=str(fault), step=step)
    events.flush()  # the next thing may be SIGKILL

  return FaultInjector(faults, cluster if isinstance(cluster, SimulatedCluster) else None, record, clock=clock)
