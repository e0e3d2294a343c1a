"""ONE attempt at the run, on the slices of one view. Start reading here.

An attempt builds the program for its slices, takes the newest state that can be trusted, and steps until the run is
complete, it is told to stop (SIGTERM), a slice has returned, or a slice is lost, which shows as an exception that
`elastic/retry.py` catches. Nothing it makes outlives it but compiled steps (in the carry) and snapshots (the session).

`step` counts completed optimizer steps everywhere: after `completed step: 100` the checkpoint of step 100 may follow,
and a run that resumes from it completes step 101 next.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from trainer import generate, program
from trainer import world as world_lib
from trainer.checkpoint import meta as checkpoint_meta
from trainer.checkpoint.arrays import fingerprint
from trainer.checkpoint.tiers import Tiers
from trainer.cluster import View
from trainer.config import counts
from trainer.config.schema import Config
from trainer.data import Prefetcher
from trainer.elastic.attempt import Carry, Outcome
from trainer.models.decoder import Params
from trainer.observe import chips
from trainer.observe.metrics import StepRecord
from trainer.observe.profiler import Profiler
from trainer.observe.throughput import Throughput
from trainer.program import Program
from trainer.session import Session
from trainer.state import TrainState


class TrainingDiverged(RuntimeError):
  """More steps in a row than max_nonfinite_steps had a loss or gradient that was not finite."""


def run(config: Config, session: Session, view: View, carry: Carry) -> Outcome:
  """Trains on the slices of `view` from the newest good state; returns how the attempt ended.

  Raises TrainingDiverged, DataError, CheckpointError or ConfigMismatch where going on makes no sense, and whatever the
  runtime raises when a slice is lost.
  """
  # ---- the program of these slices, and the state: the newest tier that can be trusted, or a fresh one
  session.begin()
  slices = dict(zip(view.slices, view.devices))
  tiers = Tiers(
    config.checkpoint,
    config.run_directory,
    world=world_lib.of_jax(),
    slices=slices,
    snapshots=session.snapshots,
    log=session.log.line,
    emit=session.events.emit,
  )
  starting = session.watchdog.during("restore and compilation")
  with starting, ThreadPoolExecutor(1, thread_name_prefix="restore") as beside:
    prog = session.program(config, view)
    # Reading and compiling need not wait for each other.
    restored = beside.submit(_restore, config, session, prog, tiers, carry)
    if carry.recoveries and session.preemption.requested(carry.last_step):
      return _save_and_end(config, session, tiers, carry, restored.result())
    compile_step = functools.partial(_compile, config, session, carry)
    compiled = carry.compiled_step(compile_step)
    start = restored.result()
  state, step = start.state, start.step
  carry.restored(step, start.tier, start.seconds)
  session.resume(step, start.meta)

  # ---- data: step n trains on batch n-1, dealt out to the living slices by the plan
  feed = program.Feed(session.loader, prog)
  prefetch = Prefetcher(feed, step, config.run.steps, config.data.prefetch_buffer_size)
  records = Records(config, session, view, carry)
  profiler = Profiler(config.run_directory, config.observe, session.log, session.events)
  session.ready(config, step)
  if step >= config.run.steps:
    done = f"All {config.run.steps} steps are done already"
    at = f" (the checkpoint is of step {step})" if step > config.run.steps else ""
    session.log.line(f"{done}{at}. Raise steps for more; a new run needs another run_name.")

  # ---- the loop
  first = step
  try:
    if _evaluation_due(config, session, step):
      _make_up_evaluation(config, session, prog, carry, state.params, step)
      records.resume()
    for index, batch in prefetch:
      step = index + 1
      profiler.before_step(index - first, functools.partial(jax.block_until_ready, state))
      batch = carry.before_step(step, batch)
      state, metrics = compiled(state, batch)
      records.dispatched(step, metrics, prefetch.waited_seconds)
      if step == first + 3:
        carry.prepare(compile_step)

      last = step == config.run.steps
      stop = session.preemption.requested(step)
      grow = not last and carry.wants_resize(step)
      evaluate = _evaluation_due(config, session, step)
      # Of the last step there is none, and an evaluation comes before it: what fails then must be done again.
      snapshot = not last and (grow or carry.snapshot_due(step) or tiers.due(step))
      if snapshot and not (grow or evaluate):
        _snapshot(config, session, carry, step, state)
      if not (last or stop or grow or evaluate or tiers.due(step)):
        continue
      records.finish()  # nothing is saved before it is known to be good
      loss = _evaluate(config, session, prog, carry, state.params, step) if evaluate and (last or not stop) else None
      with session.watchdog.during("save"):  # a save waits for the one before it, as long as that takes
        if snapshot and (grow or evaluate):
          session.snapshots.wait()
          _snapshot(config, session, carry, step, state)
        leave = last or stop or (grow and not carry.uses_snapshots)
        # Of steps in a row that were skipped nothing is saved: it would push out what was saved before them.
        worth_it = leave or not records.skipped
        if leave or tiers.due_persistent(step):
          session.metrics.flush()  # a run that resumes from here never writes these steps again
        if worth_it and tiers.maybe_save(step, state, _meta(config, session, step), last=leave, metric=loss):
          carry.at("save", step)
        if leave:
          tiers.wait()
      if stop and not last:
        return Outcome("preempted", step)
      if grow:
        return Outcome("slice_up", step)
      records.resume()
    if records.skipped:
      session.log.warning(
        f"the last {records.skipped} steps were skipped: the weights are those of step {step - records.skipped}, and "
        "going on from them gives numbers that are not finite again unless something is changed"
      )
    _sample(config, session, prog, state.params, step)
    return Outcome("complete", step)
  finally:
    session.watchdog.rest()
    with session.watchdog.during("end of the attempt"):
      prefetch.close()
      profiler.close()
      tiers.close()


@dataclasses.dataclass(frozen=True)
class _Start:
  """The state that an attempt starts from, after `step` completed steps; tier "none": a fresh one."""

  state: TrainState
  step: int
  tier: str
  seconds: float
  meta: dict[str, Any] | None = None


def _compile(config: Config, session: Session, carry: Carry, view: View) -> Any:
  """The compiled step of `view`; with it all else that an attempt there will ask of the compiler: the checksums."""
  prog = session.program(config, view)
  if carry.uses_snapshots or config.checkpoint.enable_checkpointing:
    fingerprint.prepare(prog.state)
  return prog.compile()


def _restore(config: Config, session: Session, prog: Program, tiers: Tiers, carry: Carry) -> _Start:
  """The newest state that can be trusted, or a fresh one."""
  begin = time.monotonic()

  def accept(meta: dict[str, Any]) -> None:
    carry.announce()
    changes = checkpoint_meta.check_config(meta, config.flat(), session.identity, config.run.allow_config_change)
    for change in changes:
      session.log.line(f"Changed since the checkpoint: {change}")

  session.snapshots.begin_attempt(dict(zip(carry.view.slices, carry.view.devices)), carry.survivors)
  if (saved := tiers.restore_newest(prog.state, accept)) is not None:
    state, step, tier, meta = saved.state, saved.step, saved.tier, saved.meta
  else:
    state, step, tier, meta = prog.init(jax.random.key(config.run.init_weights_seed)), 0, "none", None
  jax.block_until_ready(state)
  seconds = time.monotonic() - begin
  session.events.emit("restore", tier=tier, step=step, seconds=seconds)
  return _Start(state, step, tier, seconds, meta)


def _save_and_end(config: Config, session: Session, tiers: Tiers, carry: Carry, start: _Start) -> Outcome:
  """The end of a process that was told to stop while it recovered: nothing is computed any more, only saved."""
  carry.restored(start.step, start.tier, start.seconds)
  session.resume(start.step, start.meta)
  tiers.maybe_save(start.step, start.state, _meta(config, session, start.step), last=True)
  tiers.close()
  return Outcome("preempted", start.step)


def _snapshot(config: Config, session: Session, carry: Carry, step: int, state: TrainState) -> None:
  """Starts a snapshot of `step` where this run takes any, unless the one before it is still under way; that is waited
  for if the period is kept."""
  if not carry.uses_snapshots:
    return
  if carry.keeps_snapshot_period:
    session.snapshots.wait()
  if session.snapshots.save(step, state, _meta(config, session, step)):
    carry.at("snapshot", step)


def _meta(config: Config, session: Session, step: int) -> dict[str, Any]:
  """What a checkpoint of `step` says besides the state."""
  return checkpoint_meta.build(
    tokens=session.tokens(step),
    cursor=session.loader.cursor(step),
    config=config.flat(),
    identity=session.identity,
  )


def _evaluation_due(config: Config, session: Session, step: int) -> bool:
  """Whether the state after `step` completed steps is to be evaluated."""
  if session.eval_loader is None or step == 0:
    return False
  period = config.observe.eval_interval
  return step >= config.run.steps or (period > 0 and step % period == 0)


def _make_up_evaluation(
  config: Config, session: Session, prog: Program, carry: Carry, params: Params, step: int
) -> None:
  """Evaluates the state that the attempt starts from, unless metrics.jsonl has an evaluation of it.

  The evaluation is owed if an earlier process was told to stop at this step, or was killed before the record was safe.
  """
  if world_lib.from_primary(session.world, session.metrics.has_evaluation(step)):
    return
  session.log.line(f"An evaluation was due at step {step} and is missing: evaluating before the next step.")
  _evaluate(config, session, prog, carry, params, step)
  session.metrics.flush()  # if the process is killed from now on, the next one must not evaluate again


def _evaluate(config: Config, session: Session, prog: Program, carry: Carry, params: Params, step: int) -> float:
  """Mean loss in nats per token over the first eval_steps batches of the evaluation split, each once."""
  assert session.eval_loader is not None
  start = time.monotonic()
  feed = program.Feed(session.eval_loader, prog)
  examples = session.eval_loader.num_examples
  batches = config.observe.eval_steps
  if examples is not None:
    batches = min(batches, math.ceil(examples / session.global_batch_size))
  with session.watchdog.during("evaluation"), jax.set_mesh(prog.mesh):
    sums = [prog.evaluate(params, carry.on_slices(feed(index))) for index in range(batches)]
    carry.wait(sums)
    total, weight = (sum(float(value) for value in values) for values in zip(*sums))
  loss, seconds = total / weight if weight else math.nan, time.monotonic() - start
  session.metrics.write_eval(step, loss, seconds)
  session.events.emit("eval", step=step, seconds=seconds, loss=loss)
  session.log.line(f"eval at step {step}: loss {loss:.4f} nats per token over {weight:.0f} tokens, {seconds:.2f} s")
  return loss


def _sample(config: Config, session: Session, prog: Program, params: Params, step: int) -> None:
  """Prints what the trained model makes of sample_prompt, for a person to see that it has learned.

  The run is complete without it: where one device cannot hold the model, that is a warning.
  """
  tokenizer = session.loader.tokenizer
  if not config.observe.sample_prompt:
    return
  if tokenizer is None or session.world.size > 1:
    reason = "synthetic data has no tokenizer" if tokenizer is None else "the weights are spread over processes"
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


class Records:
  """Turns each step's metrics into a line and a record, one step behind: the devices never wait for the host."""

  def __init__(self, config: Config, session: Session, view: View, carry: Carry) -> None:
    self._session, self._view, self._carry = session, view, carry
    self._limit = config.optimizer.max_nonfinite_steps
    self._has_z_loss = config.optimizer.z_loss_multiplier > 0
    self._devices = sum(len(devices) for devices in view.devices)
    chip = chips.find(view.devices[0][0].device_kind)
    self._throughput = Throughput(
      flops_per_token=counts.flops_per_token(config.model, config.data.max_target_length),
      tokens_per_step=session.tokens_per_step,
      total_steps=config.run.steps,
      peak_flops=chip.peak_flops if chip else None,
    )
    self._pending: tuple[int, dict[str, jax.Array], float] | None = None
    self._last = time.monotonic()
    self.skipped = 0  # steps in a row up to the last recorded one whose update was not finite

  def resume(self) -> None:
    """The next step's time counts from here: evaluations and saves are no part of it."""
    self._last = time.monotonic()

  def dispatched(self, step: int, metrics: dict[str, jax.Array], data_wait: float) -> None:
    """`step` has been dispatched; the one before it is waited for and recorded."""
    self.finish()
    self._pending = (step, metrics, data_wait)

  def finish(self) -> None:
    """Waits for the last dispatched step and records it. What the runtime raises comes out here."""
    if self._pending is None:
      return
    (step, arrays, data_wait), self._pending = self._pending, None
    self._carry.wait(arrays)
    values = {key: float(value) for key, value in jax.device_get(arrays).items()}
    now = time.monotonic()
    seconds, self._last = now - self._last, now
    rates = self._throughput.rates(seconds, self._devices)
    self.skipped = skipped = int(values["skipped"])
    record = StepRecord(
      step=step,
      seconds=seconds,
      loss=values["loss"],
      grad_norm=values["grad_norm"],
      lr=values["lr"],
      tokens=self._session.tokens(step),
      slices=self._view.num_alive,
      weights=values["weight"],
      data_wait=data_wait,
      tflops_per_device=rates.tflops_per_device,
      tokens_per_second_per_device=rates.tokens_per_second_per_device,
      mfu=rates.mfu,
      eta=self._throughput.eta(step, seconds),
      skipped=skipped > 0,
      z_loss=values["z_loss"] if self._has_z_loss else None,
    )
    self._session.progress.step(record)
    self._session.metrics.write(record)
    self._session.watchdog.beat(step)
    self._carry.completed(step)
    self._session.snapshots.confirm(step)
    if skipped:
      self._nonfinite(record, skipped)

  def _nonfinite(self, record: StepRecord, skipped: int) -> None:
    self._session.events.emit("nonfinite", step=record.step, loss=record.loss, grad_norm=record.grad_norm)
    text = f"step {record.step}: loss {record.loss} and gradient norm {record.grad_norm} are not both finite"
    if skipped > self._limit:
      raise TrainingDiverged(
        f"{text} ({skipped} in a row, max_nonfinite_steps={self._limit}). The weights are those before "
        "the first of them. Lower learning_rate, clip harder (gradient_clipping_threshold), or look at the data."
      )
    self._session.log.warning(f"{text}; the update is skipped ({skipped} in a row, {self._limit} allowed)")
