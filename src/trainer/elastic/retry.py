"""The one loop around attempts, and the only place that catches errors of the runtime."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable

import jax

from trainer.cluster import Cluster, View
from trainer.config import rules
from trainer.config.errors import ConfigError, require
from trainer.config.faults import Fault, parse
from trainer.config.schema import ElasticSection
from trainer.elastic.classification import Event, Kind, classify
from trainer.elastic.elastic_run import ElasticRun, Outcome
from trainer.elastic.fault_injector import expand

# attempt(view, survivors): survivors are the slices whose host memory has outlived the previous attempt.
RunAttempt = Callable[[View, frozenset[int]], Outcome]


def elastic_retry(
  attempt: RunAttempt,
  elastic: ElasticRun,
  *,
  stop: Callable[[], bool] = lambda: False,
  sleep: Callable[[float], None] = time.sleep,
) -> Outcome:
  """Calls `attempt` until it is complete or preempted, on the slices that are alive, and returns its outcome.

  Without elastic_enabled that is one attempt on all slices. Errors that are no lost slice are raised unchanged, with a
  note that says why they were not retried. Once stop() is true, the loop waits for no more slices: the attempt runs on
  those that are alive, to save what they hold. Raises TimeoutError for too few slices within elastic_timeout_seconds.
  """
  cluster = elastic.cluster
  try:
    if elastic.cfg.elastic_enabled and cluster.recovers_in_process:
      outcome = _Loop(attempt, elastic, stop, sleep).run()
    else:
      outcome = _run(attempt, elastic, cluster.view(cluster.slices), frozenset(cluster.slices), number=1)
  finally:
    elastic.programs.close()
  if (missed := elastic.faults.faults) and outcome.kind == "complete":
    elastic.log.warning(f"these faults of fault_injection never happened: {', '.join(map(str, missed))}")
  return outcome


def _run(attempt: RunAttempt, elastic: ElasticRun, view: View, survivors: frozenset[int], number: int) -> Outcome:
  elastic.begin_attempt()
  elastic.events.emit("attempt_start", attempt=number, step=elastic.last_step, slices=list(view.slices))
  # Arrays that are not placed explicitly must not go to a dead slice's device. The context manager jax.default_device
  # would hold for this thread only, and an attempt restores, prefetches and compiles in others.
  before = jax.config.jax_default_device
  local = (device for devices in view.devices for device in devices if device.process_index == jax.process_index())
  jax.config.update("jax_default_device", next(local, before))
  try:
    return attempt(view, survivors)
  finally:
    jax.config.update("jax_default_device", before)


class _Loop:
  """Attempts until the run is complete, must stop, or cannot continue."""

  def __init__(
    self, attempt: RunAttempt, elastic: ElasticRun, stop: Callable[[], bool], sleep: Callable[[float], None]
  ) -> None:
    self._attempt, self._elastic, self._stop, self._sleep = attempt, elastic, stop, sleep
    self._unexplained_at = -1  # step of the last attempt's unexplained error; -1: it ended otherwise

  def run(self) -> Outcome:
    """The outcome of the last attempt."""
    elastic, cluster, log = self._elastic, self._elastic.cluster, self._elastic.log
    log.line("Elastic utils: Elastic training enabled.")
    log.line("Elastic Retry Enabled")
    view: View | None = None
    number = 0
    while True:
      number += 1
      before, view = view, self._wait()
      if view is None:
        log.line("Stopping with no slice alive: progress since the last checkpoint is lost.")
        return Outcome("preempted", elastic.last_step)
      survivors = frozenset(view.slices)
      if before is not None:  # a slice may also have died during the wait, and its replacement answers by now
        survivors &= frozenset(before.slices) - cluster.died(before)
      try:
        outcome = _run(self._attempt, elastic, view, survivors, number)
      except Exception as error:
        if not self._can_retry(error, view):
          raise
      else:
        self._elastic.events.emit("attempt_end", step=outcome.step, outcome=outcome.kind)
        if outcome.kind != "slice_up":
          return outcome
        self._grow(view, outcome.step)

  def _wait(self) -> View | None:
    """The view of the next attempt: as soon as enough slices are alive, or of those alive once the run must stop."""
    elastic = self._elastic
    cluster, timeout = self._elastic.cluster, elastic.cfg.elastic_timeout_seconds
    if elastic.recovery.under_way:
      elastic.begin_wait()
    alive = cluster.wait_for(elastic.fewest_slices, timeout, self._stop)
    elastic.end_wait(alive)
    return cluster.view(alive) if alive else None

  def _can_retry(self, error: Exception, view: View) -> bool:
    """Whether another attempt makes sense after `error` of the last one; prepares for it, after a pause if need be."""
    elastic = self._elastic
    elastic.announce()  # if the attempt ended before it had a state
    event = classify(error, self._elastic.cluster, view)
    outcome = "slice_down" if event.is_slice_loss else "failed"
    self._elastic.events.emit("attempt_end", step=elastic.last_step, outcome=outcome)
    step = elastic.current_step
    retry = event.is_slice_loss or (event.kind is Kind.UNKNOWN and step != self._unexplained_at)
    if event.is_slice_loss:
      self._lose(event, view)
    elif retry:
      self._elastic.log.warning(f"step {step} failed for an unknown reason ({event.reason}). Trying it once more")
      self._elastic.programs.forget_steps()  # in case the reason is a step that was compiled for a slice's earlier life
    self._unexplained_at = step if event.kind is Kind.UNKNOWN else -1
    pause = elastic.retries.failed() if retry else None
    if pause is None:
      error.add_note(f"not retried: {event.reason} ({event.kind}, attempt {elastic.retries.attempt})")
      return False
    traceback.clear_frames(error.__traceback__)  # they hold the dead attempt's arrays
    elastic.announce_next_attempt()
    if pause:
      self._elastic.log.line(f"No progress since the last event; pausing {pause:g} s.")
      self._pause(pause)
    return True

  def _lose(self, event: Event, view: View) -> None:
    """Records that slices of `view` were lost."""
    elastic = self._elastic
    # The fault came after the last sign of life. The exact time is known only for an injected fault.
    began = max(elastic.last_progress_at, elastic.faults.last_fired_at)
    elastic.lose(event, frozenset(view.slices) - event.lost, began, before=view.num_alive, step=elastic.last_step)

  def _grow(self, view: View, step: int) -> None:
    """Records that the attempt on `view` has ended after `step` so that the next one uses returned slices."""
    elastic = self._elastic
    elastic.resizes.resized()
    if lost := self._elastic.cluster.lost(view):
      self._lose(Event(Kind.SLICE_DOWN, "the health check at a resize missed it", lost), view)
    alive = self._elastic.cluster.alive()
    returned = sorted(alive - frozenset(view.slices))
    if not returned:
      self._elastic.log.line("The returned slices do not answer any more. Continuing without them.")
      return
    elastic.grow(returned, alive, before=view.num_alive, step=step)

  def _pause(self, seconds: float) -> None:
    end = self._elastic.clock() + seconds
    while (left := end - self._elastic.clock()) > 0 and not self._stop():
      self._sleep(min(left, 1.0))


def check(cluster: Cluster, cfg: ElasticSection, steps: int) -> list[Fault]:
  """The faults of a run of `steps` steps. Raises ConfigError where cluster and elastic keys do not fit each other."""
  if cfg.elastic_enabled and cluster.recovers_in_process and cluster.world.size > 1:
    raise ConfigError(
      f"elastic_enabled=true: the {cluster.world.size} processes of this run share one JAX world, which cannot lose "
      "any of them.\nUse one process (cluster=pathways or simulated), or elastic_enabled=false."
    )
  if cfg.witness_period and cluster.num_slices == 1:
    raise ConfigError(
      f"witness_period={cfg.witness_period}: a witness compares what two slices compute, and there is one slice.\n"
      "Use several slices, or witness_period=0."
    )
  one_program = cluster.recovers_in_process
  require(rules.single_controller_conflicts(cfg, cluster.kind) if one_program else rules.multiprocess_conflicts(cfg))
  if cfg.elastic_enabled and cfg.elastic_min_slice_count > cluster.num_slices:
    raise ConfigError(
      f"elastic_min_slice_count={cfg.elastic_min_slice_count}: there are only {cluster.num_slices} slices.\n"
      f"Use at most {cluster.num_slices}, or -1 for all."
    )
  faults = expand(parse(cfg.fault_injection), cluster.num_slices, steps)
  if any(fault.slice is not None and not fault.is_flip for fault in faults) and cluster.fault_target is None:
    raise ConfigError(
      f"fault_injection={cfg.fault_injection}: slices of a {cluster.kind} cluster cannot be lost on command.\n"
      "Delete a worker pod there, or rehearse with cluster_standin=3x4, cluster=simulated or trainer.launch.local."
    )
  return faults
