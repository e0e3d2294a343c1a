"""ONE attempt at the run, on the slices of one view. Start reading here.

An attempt builds the program for its slices, restores the newest good state, and steps until the run is complete, the
process must stop (SIGTERM), a slice has returned, or a slice is lost. A lost slice shows as an exception, which
`elastic/retry.py` catches. Only the session (programs, snapshots, data, records) outlives an attempt.

The loop is the same whether one controller drives all slices or each slice is a world of its own: it calls only
`run/driver.py`, which `drivers/` implements twice. `run/attempt.py` has the parts that follow a step.

`step` counts completed optimizer steps everywhere: after `completed step: 100` the checkpoint of step 100 may follow,
and a run that resumes from it completes step 101 next.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools

import jax

from trainer.cluster import View
from trainer.cluster.multiprocess import MultiprocessCluster
from trainer.drivers.local_rounds import LocalRounds
from trainer.drivers.many_worlds import ManyWorlds
from trainer.drivers.one_controller import OneController
from trainer.elastic.elastic_run import Outcome
from trainer.process.stop import StopRequested
from trainer.program.state import TrainState
from trainer.run import after_step
from trainer.run.after_step import Due
from trainer.run.attempt import Attempt
from trainer.run.driver import Driver, Start
from trainer.run.session import Session


def run(session: Session, view: View, survivors: frozenset[int]) -> Outcome:
  """Trains on the slices of `view` from the newest good state. Returns how the attempt ended.

  survivors: slices whose host memory has outlived the previous attempt. Raises TrainingDiverged, DataError,
  CheckpointError or ConfigMismatch if another attempt makes no sense; the runtime's error if a slice is lost.
  """
  session.begin()
  with contextlib.ExitStack() as stack:
    with session.watchdog.during("restore and compilation"):
      attempt = Attempt(session, view, survivors, stack, _driver)
      start = attempt.driver.start(attempt.restore, attempt.resume)
    if start.stops:
      attempt.save(start.step, start.state, None, last=True)
      return Outcome("preempted", start.step)
    session.ready(start.step)
    try:
      outcome, state = _train(attempt, start)
    except attempt.driver.coordination_errors:
      step, last = attempt.driver.last_state()
      if last is not None:
        with session.watchdog.during("save"):
          attempt.backups.save(step, last, session.data.meta(session.config, step), last=True, is_new=False)
      return Outcome("preempted", step)
    if outcome.kind == "complete":
      attempt.completed(outcome.step, state)
    return outcome


def _driver(attempt: Attempt) -> Driver:
  """One program on all slices; or, if slices are worlds of their own, the part of this process's slice."""
  cluster, shared = attempt.session.cluster, (attempt.session, attempt.view, attempt.program)
  if isinstance(cluster, MultiprocessCluster):
    takes_part = LocalRounds if attempt.config.optimizer.has_local_steps else ManyWorlds
    return takes_part(*shared, cluster.peers, attempt.backups)
  return OneController(*shared, attempt.wait)


def _train(attempt: Attempt, start: Start) -> tuple[Outcome, TrainState]:
  """Trains from `start`, if steps are left. Returns the outcome and the last state."""
  state, step, steps, log = start.state, start.step, attempt.config.run.steps, attempt.session.log
  if step >= steps:
    restored = f" (the checkpoint is of step {step})" if step > steps else ""
    log.line(
      f"All {steps} steps are done already{restored}. Raise steps to train longer; a new run needs another run_name."
    )
  loss = start.eval_loss
  if not start.evaluated and attempt.evaluation_due(step):
    loss = attempt.make_up_evaluation(state.params, step)
    if loss is None:
      attempt.save(step, state, None, last=True)
      return Outcome("preempted", step), state
  attempt.records.restart_clock()
  if attempt.target_reached(step, loss) or step >= steps:
    attempt.save(step, state, loss, last=True)
    return Outcome("complete", step), state
  return _loop(attempt, start)


def _loop(attempt: Attempt, start: Start) -> tuple[Outcome, TrainState]:
  driver, records, backups, elastic = attempt.driver, attempt.records, attempt.backups, attempt.elastic
  state, step, steps = start.state, start.step, attempt.config.run.steps
  while step < steps:
    computed = functools.partial(jax.block_until_ready, state)
    wait = functools.partial(attempt.wait.call, computed, f"the profile before step {step + 1}")
    attempt.profiler.before_step(step - start.step, wait)
    before, step = step, attempt.next_step(step)
    try:
      state, metrics = driver.step(state, step)
    except StopRequested as stopped:  # in a round of local steps
      (state,) = stopped.args
      attempt.session.stop.requested(before)
      log = attempt.session.log
      log.line(f"The round of local steps after step {before} stops here: its steps will be done again.")
      attempt.save(before, state, None, last=True)
      return Outcome("preempted", before), state
    records.dispatched(step, metrics, state)
    if not driver.runs_ahead:
      records.finish()

    backups.completed(step)
    due = Due(
      last=step == steps and not driver.leaves(),
      stop=attempt.session.stop.requested(step),
      resize=driver.resize_due(step),
      evaluation=attempt.evaluation_due(step),
      checkpoint=backups.due(step),
      snapshot=elastic.snapshot_due(step),
    )
    actions = after_step.decide(due, uses_snapshots=elastic.uses_snapshots)
    if actions.snapshot == "early":
      attempt.snapshot(step, state)
    if not actions.record:
      continue
    records.finish()
    if actions.snapshot == "late":
      attempt.snapshot(step, state, waits=True)
    loss = attempt.evaluate(state.params, step) if actions.evaluate else None
    if actions.evaluate and loss is None:
      actions = after_step.decide(dataclasses.replace(due, last=False, stop=True), uses_snapshots=False)
    if attempt.target_reached(step, loss):
      actions = dataclasses.replace(actions, save="final", end="complete")
    if actions.save != "none":
      attempt.save(step, state, loss, last=actions.save == "final")
    if actions.end in ("preempted", "slice_up"):
      return Outcome(actions.end, step), state
    if actions.end == "complete":
      break
    records.restart_clock()
  records.warn_if_skipped(step)
  return Outcome("complete", step), state
