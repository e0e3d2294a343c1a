"""ONE attempt at the run, on the slices of one view. Start reading here.

An attempt builds the program for its slices, restores the newest good state, and steps until the run is complete, the
process must stop (SIGTERM), a slice has returned, or a slice is lost. A lost slice shows as an exception, which
`elastic/retry.py` catches. Only the session (programs, snapshots, data, records) outlives an attempt.

`step` counts completed optimizer steps everywhere: after `completed step: 100` the checkpoint of step 100 may follow,
and a run that resumes from it completes step 101 next.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable
from typing import Any

import jax
from jax import Device

from trainer import after_step, generate, peer_attempt, program
from trainer import world as world_lib
from trainer.after_step import Actions, Due
from trainer.checkpoint.tiers import Tiers
from trainer.cluster import View
from trainer.config.mixture import EVAL_DATA
from trainer.config.schema import Config
from trainer.data import Prefetcher
from trainer.elastic.attempt import ElasticRun, Outcome
from trainer.elastic.hang import Waiter
from trainer.membership.client import SupervisorLost
from trainer.models.decoder import Params
from trainer.observe.profiler import Profiler
from trainer.peer_stepper import PeerStepper
from trainer.program import Program
from trainer.session import Session
from trainer.start import Start, may_resume
from trainer.state import TrainState
from trainer.step_records import StepRecords
from trainer.stepper import FusedStepper, Stepper


def run(config: Config, session: Session, elastic: ElasticRun, view: View, survivors: frozenset[int]) -> Outcome:
  """Trains on the slices of `view` from the newest good state. Returns how the attempt ended.

  survivors: slices whose host memory has outlived the previous attempt. Raises TrainingDiverged, DataError,
  CheckpointError or ConfigMismatch if another attempt makes no sense, and the runtime's error if a slice is lost.
  """
  session.begin()
  peers = elastic.cluster.peers  # where every slice is a world of its own
  with contextlib.ExitStack() as stack:
    # ---- the program of these slices, and the newest good state (or a fresh one): reading and compiling in parallel
    slices = dict(zip(view.slices, view.devices))
    guard = elastic.guard(view, session.watchdog.late_after)
    tiers = Tiers(
      config.checkpoint,
      config.run_directory,
      world=session.cluster.world,
      run_id=session.run_id,
      slices=session.cluster.copied(view),
      snapshots=session.snapshots,
      saves_in_storage=session.cluster.saves_in_storage,
      fetch=guard.call if session.cluster.is_behind_proxy else None,
      log=session.log.line,
      warn=session.log.warning,
      emit=session.events.emit,
    )
    stack.callback(_close, session, tiers.close)
    with session.watchdog.during("restore and compilation"):
      prog = session.programs.program(view)
      restore = functools.partial(_restore, config, session, elastic, prog, tiers, slices, survivors)
      if peers is None:
        restoring = Waiter(restore, "the restore")
        if elastic.recovery.under_way and session.preemption.requested(elastic.steps.last_step):
          return _save_and_end(config, session, elastic, tiers, guard.result(restoring))
        compiled_step = _compiled_step(session, elastic, view)
        start = guard.result(restoring)
      else:  # first the compilation: a member joins the others when it can compute
        compiled_step = _compiled_step(session, elastic, view)
        start = peer_attempt.join(session, elastic, peers, prog.state, tiers, restore)
    state, step = start.state, start.step
    _resume(session, elastic, start)

    # ---- data: step n trains on batch n-1, divided among the slices that are alive
    train_feed = program.Feed(session.data.train, prog)
    eval_feeds = [program.Feed(loader, prog) for loader in session.data.evaluations.values()]
    stepper: Stepper
    if peers is None:
      batches = Prefetcher(train_feed, step, config.run.steps)
      stepper = FusedStepper(elastic, view, guard, prog, compiled_step, batches, eval_feeds)
    else:
      header = functools.partial(peer_attempt.header, config, session, elastic)
      during = session.watchdog.during
      stepper = PeerStepper(elastic, peers, compiled_step, train_feed, eval_feeds, header, start, config, during)
    stack.callback(_close, session, stepper.close)
    records = StepRecords(config, session, elastic, stepper, prog.mesh.devices.flat[0])
    profiler = Profiler(config.run_directory, config.observe, session.log, session.events)
    stack.callback(_close, session, profiler.close)
    session.ready(config, step)
    if step >= config.run.steps:
      done = f"All {config.run.steps} steps are done already"
      restored = f" (the checkpoint is of step {step})" if step > config.run.steps else ""
      session.log.line(f"{done}{restored}. Raise steps to train longer; a new run needs another run_name.")

    # ---- the loop
    loss = start.eval_loss
    try:
      if not start.evaluated and _evaluation_due(config, session, step):
        loss = _make_up_evaluation(config, session, elastic, stepper, state.params, step)
      records.restart_clock()
      if _target_reached(config, session, step, loss) or step >= config.run.steps:
        if start.tier != "persistent":  # an earlier process may have ended before it committed the last checkpoint
          with session.watchdog.during("save"):
            if tiers.save_in_storage(step, state, session.data.meta(config, step), metric=loss):
              elastic.reached("save", step)
            _commit_last(config, session, tiers, step, state, loss)
        outcome = Outcome("complete", step)
      else:
        outcome, state = _loop(config, session, elastic, tiers, stepper, records, profiler, state, step)
    except SupervisorLost:
      assert isinstance(stepper, PeerStepper)
      return peer_attempt.end_without_supervisor(config, session, tiers, stepper, records)
    if outcome.kind == "complete":
      _sample(config, session, prog, state.params, outcome.step)
    return outcome


def _loop(
  config: Config,
  session: Session,
  elastic: ElasticRun,
  tiers: Tiers,
  stepper: Stepper,
  records: StepRecords,
  profiler: Profiler,
  state: TrainState,
  step: int,
) -> tuple[Outcome, TrainState]:
  """Trains from `state`, after `step` completed steps. Returns the outcome and the last state."""
  first = step
  while step < config.run.steps:
    profiler.before_step(step - first, functools.partial(stepper.wait, state, f"the profile before step {step + 1}"))
    step += 1
    state, metrics = stepper.step(state, step)
    records.dispatched(step, metrics)
    if not stepper.runs_ahead:
      records.finish()

    due = Due(
      last=step == config.run.steps and not peer_attempt.leaves(session.cluster.peers),
      stop=session.preemption.requested(step),
      resize=stepper.resize_due(step),
      evaluation=_evaluation_due(config, session, step),
      checkpoint=tiers.owed(step) or tiers.due(step),
      snapshot=elastic.snapshot_due(step),
    )
    actions = after_step.decide(due, uses_snapshots=elastic.uses_snapshots)
    if actions.snapshot == "early":
      _snapshot(config, session, elastic, stepper, step, state)
    if not actions.record:
      continue
    records.finish()
    loss = _evaluate(config, session, elastic, stepper, state.params, step) if actions.evaluate else None
    if _target_reached(config, session, step, loss):
      actions = dataclasses.replace(actions, snapshot="none", save="final", end="complete")
    _save(config, session, elastic, tiers, stepper, records, actions, step, state, loss)
    if actions.end in ("preempted", "slice_up"):
      return Outcome(actions.end, step), state
    if actions.end == "complete":
      break
    records.restart_clock()
  if records.skipped:
    session.log.warning(
      f"the last {records.skipped} steps were skipped, because their loss or gradient was not finite: the weights are "
      f"those of step {step - records.skipped}. Change the learning rate, the data or the model before you continue"
    )
  return Outcome("complete", step), state


def _save(
  config: Config,
  session: Session,
  elastic: ElasticRun,
  tiers: Tiers,
  stepper: Stepper,
  records: StepRecords,
  actions: Actions,
  step: int,
  state: TrainState,
  loss: float | None,
) -> None:
  """Takes the late snapshot and saves what is due. loss: of the evaluation of this state, if it was evaluated."""
  with session.watchdog.during("save"):  # includes waiting for the save before it
    if actions.snapshot == "late":
      _wait_for_snapshot(session, stepper)
      _snapshot(config, session, elastic, stepper, step, state)
    final = actions.save == "final"
    if final or tiers.due_persistent(step):
      session.metrics.flush(wait=not final)  # a run that resumes from this checkpoint never writes these steps again
    # Do not save while updates are skipped: retention would delete good checkpoints.
    if not final and (actions.save != "due" or records.skipped):
      return
    tiers.maybe_save(step, state, session.data.meta(config, step), last=final, metric=loss)
    elastic.reached("save", step)
    if final:
      _commit_last(config, session, tiers, step, state, loss)


def _commit_last(
  config: Config, session: Session, tiers: Tiers, step: int, state: TrainState, loss: float | None
) -> None:
  """Waits until the last save of the process is committed, by this member or by the member that saves in storage."""
  tiers.wait()
  if peer_attempt.must_save_for_another(session.cluster.peers):
    tiers.save_in_storage(step, state, session.data.meta(config, step), metric=loss)


def _target_reached(config: Config, session: Session, step: int, loss: float | None) -> bool:
  """Whether the run is complete because `loss`, of the state after `step`, is at or below target_eval_loss."""
  target = config.observe.target_eval_loss
  if not target or loss is None or not loss <= target:
    return False
  session.log.line(
    f"The evaluation loss {loss:.4f} at step {step} reaches target_eval_loss={target:g}: the run is complete. "
    "Lower target_eval_loss to train longer."
  )
  return True


def _compiled_step(session: Session, elastic: ElasticRun, view: View) -> Any:
  """Returns the compiled step of `view`. Records in the recovery log how long the attempt waited for it."""
  start = time.monotonic()
  compiled_step = session.programs.step(view)
  elastic.recovery.compiled(time.monotonic() - start)
  return compiled_step


def _restore(
  config: Config,
  session: Session,
  elastic: ElasticRun,
  prog: Program,
  tiers: Tiers,
  slices: dict[int, tuple[Device, ...]],
  survivors: frozenset[int],
) -> Start:
  """Returns the newest good state, or a fresh one."""
  begin = time.monotonic()

  def accept(meta: dict[str, Any]) -> None:
    elastic.announce()
    may_resume(config, session.data, meta, session.log.line)

  session.snapshots.begin_attempt(slices, survivors)
  if (saved := tiers.restore_newest(prog.state, accept)) is not None:
    state, step, tier, meta = saved.state, saved.step, saved.tier, saved.meta
  else:
    state, step, tier, meta = prog.init(jax.random.key(config.run.init_weights_seed)), 0, "none", None
  jax.block_until_ready(state)
  seconds = time.monotonic() - begin
  session.events.emit("restore", tier=tier, step=step, seconds=seconds)
  due = _evaluation_due(config, session, step)
  recorded = session.metrics.eval_loss(step, session.data.evaluations, session.data.main_set) if due else None
  loss = world_lib.from_primary(session.cluster.world, recorded) if due else None
  return Start(state, step, tier, seconds, loss is not None, meta, loss)


def _resume(session: Session, elastic: ElasticRun, start: Start) -> None:
  """Sets the elastic loop and the data to the restored state."""
  elastic.restored(start.step, start.tier, start.seconds)
  for line in session.data.resume(start.step, start.meta):
    session.log.line(line)


def _save_and_end(config: Config, session: Session, elastic: ElasticRun, tiers: Tiers, start: Start) -> Outcome:
  """Ends a process that must stop during a recovery: saves the restored state and computes nothing more."""
  _resume(session, elastic, start)
  if start.tier != "persistent":
    tiers.save_in_storage(start.step, start.state, session.data.meta(config, start.step))
  return Outcome("preempted", start.step)


def _close(session: Session, close: Callable[[], object]) -> None:
  """Closes one part of an attempt that has ended; no step is expected any more."""
  session.watchdog.rest()
  with session.watchdog.during("end of the attempt"):
    close()


def _snapshot(
  config: Config, session: Session, elastic: ElasticRun, stepper: Stepper, step: int, state: TrainState
) -> None:
  """Starts a snapshot of `step`, unless the snapshot before it is still being copied. With a fixed period, waits."""
  if elastic.snapshot_policy.is_fixed:
    _wait_for_snapshot(session, stepper)
  if session.snapshots.save(step, state, session.data.meta(config, step)):
    elastic.reached("snapshot", step)


def _wait_for_snapshot(session: Session, stepper: Stepper) -> None:
  """Returns when no snapshot is being copied. A slice that hangs never completes its copy: raises SliceHang."""
  if session.snapshots.busy:
    stepper.call(session.snapshots.wait, "the last snapshot")


def _evaluation_due(config: Config, session: Session, step: int) -> bool:
  """Whether the state after `step` completed steps should be evaluated."""
  if not session.data.evaluations or step == 0:
    return False
  period = config.observe.eval_interval
  return step >= config.run.steps or (period > 0 and step % period == 0)


def _make_up_evaluation(
  config: Config, session: Session, elastic: ElasticRun, stepper: Stepper, params: Params, step: int
) -> float:
  """Evaluates the state that the attempt starts from: an evaluation is due there, and metrics.jsonl does not have it.

  Returns its loss. An earlier process stopped at this step, was killed before the record was safe, or had fewer sets.
  """
  session.log.line(f"An evaluation was due at step {step}, and it or one of its sets is missing: evaluating now.")
  loss = _evaluate(config, session, elastic, stepper, params, step)
  session.metrics.flush()  # if the process is killed from now on, the next one must not evaluate again
  return loss


def _evaluate(
  config: Config, session: Session, elastic: ElasticRun, stepper: Stepper, params: Params, step: int
) -> float:
  """Evaluates each evaluation set on its first eval_steps batches, and writes the mean losses, in nats per token.

  Returns the loss of the main set.
  """
  start, data = time.monotonic(), session.data
  elastic.reached("eval", step)
  with session.watchdog.during("evaluation"):
    computed = stepper.evaluate(params, data.eval_batches(config.observe.eval_steps))
    sums = stepper.read(computed, f"the evaluation at step {step}")
    totals = [[sum(float(value) for value in values) for values in zip(*parts)] for parts in sums]
  losses = {name: loss / weight if weight else math.nan for name, (loss, weight) in zip(data.evaluations, totals)}
  seconds, main = time.monotonic() - start, losses[data.main_set]
  session.metrics.write_eval(step, main, seconds, losses if len(losses) > 1 else None)
  session.events.emit("eval", step=step, seconds=seconds, loss=main)
  for (name, loss), (_, weight) in zip(losses.items(), totals):
    of_set = "" if name == EVAL_DATA else f" of {name}"
    session.log.line(
      f"eval{of_set} at step {step}: loss {loss:.4f} nats per token over {weight:.0f} tokens, {seconds:.2f} s"
      + (" for all sets" if len(losses) > 1 else "")
    )
  return main


def _sample(config: Config, session: Session, prog: Program, params: Params, step: int) -> None:
  """Prints the trained model's continuation of sample_prompt, so that a person sees what it has learned.

  The run is complete without it: if one device cannot hold the model, the log has a warning.
  """
  tokenizer = session.data.train.tokenizer
  if not config.observe.sample_prompt or not session.cluster.saves_in_storage():
    return
  if tokenizer is None or session.cluster.world.size > 1:
    reason = "the data have no tokenizer" if tokenizer is None else "the weights are spread over processes"
    session.log.warning(f"no sample is made of sample_prompt: {reason}")
    return
  start = time.monotonic()
  try:
    with session.watchdog.during("sample"):
      text = generate.continue_text(
        prog.model,
        jax.device_put(params, prog.mesh.devices.flat[0]),
        tokenizer,
        config.observe.sample_prompt,
        tokens=config.observe.sample_tokens,
        seed=config.run.init_weights_seed,
      )
  except jax.errors.JaxRuntimeError as error:
    session.log.warning(f"no sample is made of sample_prompt, one device must hold the whole model for it: {error}")
    return
  session.log.line(f"--- sample after step {step} ---\n{config.observe.sample_prompt}{text}\n--- end of sample ---")
  session.events.emit(
    "sample", step=step, seconds=time.monotonic() - start, prompt=config.observe.sample_prompt, text=text
  )
