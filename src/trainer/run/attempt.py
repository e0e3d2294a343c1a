"""One attempt: its program, its backups, its driver, and the parts of a step that follow the step itself."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable
from typing import Any

import jax

from trainer import world as world_lib
from trainer.checkpoint.backups import Backups
from trainer.checkpoint.checkpoint_errors import CheckpointError
from trainer.checkpoint.state_backup import RunContext
from trainer.cluster import View
from trainer.config.mixture_files import EVAL_DATA
from trainer.models.decoder import Params
from trainer.observe.metrics import Evaluation
from trainer.observe.profiler import Profiler
from trainer.process.stop import StopRequested
from trainer.program import local_steps, optimizers
from trainer.program.program import Program
from trainer.program.state import TrainState
from trainer.run.driver import Driver, Start
from trainer.run.plugins import Completed
from trainer.run.session import Session
from trainer.run.step_records import StepRecords


class Attempt:
  """What an attempt on the slices of `view` is made of. `step` counts completed steps."""

  def __init__(
    self,
    session: Session,
    view: View,
    survivors: frozenset[int],
    stack: contextlib.ExitStack,
    make_driver: Callable[[Attempt], Driver],
  ) -> None:
    """Makes everything about these slices that needs no array. `stack` closes it. survivors: slices whose host memory
    has outlived the previous attempt. make_driver: gets this attempt with its program and its backups."""
    self.session, self.view, self.survivors = session, view, survivors
    config, self.elastic, cluster = session.config, session.elastic, session.cluster
    self.config = config

    def close(call: Callable[[], object]) -> None:
      session.watchdog.pause()  # no step is expected any more
      with session.watchdog.during("end of the attempt"):
        call()

    self.wait = session.elastic.waits_on(view, session.watchdog.late_after, lambda: session.stop.noticed)
    run = RunContext(
      cluster.world,
      session.folder.run_id,
      self.wait.call if cluster.is_behind_proxy else None,
      log=session.log.line,
      warn=session.log.warning,
      emit=session.events.emit,
    )
    self.backups = Backups(
      config.checkpoint, config.run_directory, run, cluster.copied(view), session.snapshots, cluster.saves_in_storage
    )
    stack.callback(close, self.backups.close)
    self.program = session.programs.program(view)
    self.driver = make_driver(self)
    stack.callback(close, self.driver.close)
    self.records = StepRecords(session, self.driver, self.wait, self.program.mesh.devices.flat[0])
    self.profiler = Profiler(config.run_directory, config.observe, session.log, session.events)
    stack.callback(close, self.profiler.close)

  # ---- the beginning

  def restore(self) -> Start:
    """Returns the newest good state, or a fresh one."""
    session, begin = self.session, time.monotonic()
    session.snapshots.begin_attempt(dict(zip(self.view.slices, self.view.devices)), self.survivors)
    completed = self.elastic.last_step
    if (saved := self.backups.restore_newest(self.program.state, self._accept, completed=completed)) is not None:
      state, step, tier, meta = saved.state, saved.step, saved.tier, saved.meta
    elif completed:
      raise CheckpointError(
        f"step {completed} was completed, and no copy of the state is left: neither in memory nor "
        "in a checkpoint. Start the same command again to begin at step 0; checkpoints (enable_checkpointing, "
        "checkpoint_period) and snapshots (snapshot_period) prevent this"
      )
    else:
      if earlier := session.metrics.earlier_step:
        session.log.line(f"No checkpoint is left, though step {earlier} was completed: the run begins again at step 0.")
      state, step, tier, meta = _fresh_state(session, self.program), 0, "none", None
    jax.block_until_ready(state)
    if self.elastic.uses_snapshots:
      session.snapshots.reserve(state)
    seconds = time.monotonic() - begin
    session.events.emit("restore", tier=tier, step=step, seconds=seconds)
    due = self.evaluation_due(step)
    recorded = session.metrics.eval_loss(step, session.data.evaluations, session.data.main_set) if due else None
    loss = world_lib.from_primary(session.cluster.world, recorded) if due else None
    return Start(state, step, tier, seconds, loss is not None, meta, loss)

  def _accept(self, meta: dict[str, Any]) -> None:
    """Raises ConfigMismatch if a checkpoint with this `meta` belongs to a run with other numbers."""
    config, session = self.config, self.session
    self.elastic.announce()
    for change in session.data.accept(config, meta):
      session.log.line(f"Changed since the checkpoint: {change}")
    of_config = self.program.user_optimizer == optimizers.NO_OVERRIDES
    if of_config and (rise := optimizers.rise(config.optimizer, config.run.steps, meta["config"], meta["step"])):
      session.log.line(f"warning: {rise}")

  def resume(self, start: Start) -> None:
    """Sets the elastic loop and the data to the state that the attempt starts from."""
    self.start = start
    self.elastic.restored(start.step, start.tier, start.seconds)
    for line in self.session.data.resume(start.step, start.meta):
      self.session.log.line(line)

  def next_step(self, step: int) -> int:
    """The step that the driver completes next, after `step` completed steps: with local steps the end of the round."""
    return local_steps.end_of_round(self.config.optimizer, step, self.config.run.steps)

  # ---- backups

  def snapshot(self, step: int, state: TrainState, *, waits: bool = False) -> None:
    """Starts a snapshot of `step`, unless the one before it is still being copied. waits, or a fixed period: waits."""
    if waits or self.elastic.snapshot_policy.is_fixed:
      self._wait_for_snapshot()
    if self.session.snapshots.save(step, state, self.session.data.meta(self.config, step)):
      self.elastic.snapshot_policy.taken(step)
      self.elastic.inject_faults("snapshot", step)

  def _wait_for_snapshot(self) -> None:
    """Returns when no snapshot is being copied. A slice that hangs never completes its copy: raises SliceHang."""
    if self.session.snapshots.busy:
      self.wait.call(self.session.snapshots.wait, "the last snapshot")

  def save(self, step: int, state: TrainState, loss: float | None, *, last: bool) -> None:
    """Saves what is due after `step`. last: no step follows in this process; returns when the state is committed in
    storage, by this member or by the member that saves there. loss: of the evaluation of this state, if it was
    evaluated."""
    session, backups, is_new = self.session, self.backups, step != self.start.step
    if last:
      self.elastic.recovered(self.driver.alive)
    if not is_new and self.start.tier in ("none", "persistent"):
      return
    # An earlier process may have ended before it had committed the state that was restored.
    with session.watchdog.during("save"), self.elastic.recovery.paused():  # includes waiting for the save before it
      if last or backups.due_persistent(step):
        # A run that resumes from this checkpoint never writes these steps again.
        session.metrics.flush(wait=not last)
      # Do not save while updates are skipped: retention would delete good checkpoints.
      if not last and self.records.skipped:
        return
      begun = functools.partial(self.elastic.inject_faults, "save", step)
      save = functools.partial(backups.save, step, state, session.data.meta(self.config, step), metric=loss, last=last)
      save(is_new=is_new, begun=begun)
      if last:
        backups.wait()
        if self.driver.must_save():
          save(is_new=False)

  def completed(self, step: int, state: TrainState) -> None:
    """Plug-ins use the state of the last step. The run stays complete if the process must end before they are done."""
    try:
      self.session.plugins.completed(Completed(step, state.params, self.program, self._unless_ending))
    except StopRequested:
      self.session.log.line("The process must end. All steps are done and saved; work after the last step is left out.")

  def _unless_ending(self, work: Callable[[], Any], name: str) -> Any:
    with self.session.watchdog.during(name):
      return self.wait.until_stop(work, f"the {name}")

  # ---- evaluations

  def evaluation_due(self, step: int) -> bool:
    if not self.session.data.evaluations or step == 0:
      return False
    period = self.config.observe.eval_interval
    return step >= self.config.run.steps or (period > 0 and step % period == 0)

  def make_up_evaluation(self, params: Params, step: int) -> float | None:
    """Evaluates the state that the attempt starts from, because an evaluation is due and metrics.jsonl does not have
    it, or not for all sets. Returns as `evaluate`. An earlier process stopped or was killed here, or had fewer sets."""
    self.session.log.line(
      f"An evaluation was due at step {step}, and it or one of its sets is missing: evaluating now."
    )
    loss = self.evaluate(params, step)
    self.session.metrics.flush()  # if the process is killed from now on, the next one must not evaluate again
    return loss

  def evaluate(self, params: Params, step: int) -> float | None:
    """Returns the main set's mean loss on its first eval_steps batches, in nats per token. Records those of all sets.
    None, and no record: the process must end."""
    session, data, start = self.session, self.session.data, time.monotonic()
    self.elastic.inject_faults("eval", step)
    with session.watchdog.during("evaluation"), self.elastic.evaluating():
      try:
        sums = self.driver.evaluate(params, data.eval_batches(self.config.observe.eval_steps))
      except StopRequested:
        session.stop.requested(step)
        session.log.line(f"The evaluation at step {step} stops here: another process does it.")
        return None
    totals = [[sum(float(value) for value in values) for values in zip(*parts)] for parts in sums]
    losses = {name: loss / weight if weight else math.nan for name, (loss, weight) in zip(data.evaluations, totals)}
    seconds, main = time.monotonic() - start, losses[data.main_set]
    session.metrics.write_eval(Evaluation(step, main, seconds, losses if len(losses) > 1 else None))
    session.events.emit("eval", step=step, seconds=seconds, loss=main)
    for (name, loss), (_, weight) in zip(losses.items(), totals):
      of_set = "" if name == EVAL_DATA else f" of {name}"
      session.log.line(
        f"eval{of_set} at step {step}: loss {loss:.4f} nats per token over {weight:.0f} tokens, {seconds:.2f} s"
        + (" for all sets" if len(losses) > 1 else "")
      )
    return main

  def target_reached(self, step: int, loss: float | None) -> bool:
    """Whether the run is complete because `loss`, of the state after `step`, is at or below target_eval_loss."""
    target = self.config.observe.target_eval_loss
    if not target or loss is None or not loss <= target:
      return False
    self.session.log.line(
      f"The evaluation loss {loss:.4f} at step {step} reaches target_eval_loss={target:g}: the run is complete. "
      "Lower target_eval_loss to train longer."
    )
    return True


def _fresh_state(session: Session, program: Program) -> TrainState:
  """The state of step 0: with the parameters of load_parameters_path, or with random ones."""
  if session.weights is None:
    return program.init(jax.random.key(session.config.run.init_weights_seed))
  source = session.weights()
  session.log.line(f"The parameters are those of {source.where}.")
  return program.init_from(source.load(program.state.params, session.cluster.world))
