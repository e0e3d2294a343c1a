"""ONE attempt at the run, on the slices of one view. Start reading here.

An attempt builds the program for its slices, takes the newest state that can be trusted, and steps until the run is
complete, it is told to stop (SIGTERM), a slice has returned, or a slice is lost, which shows as an exception that
`elastic/retry.py` catches. Nothing it makes outlives it but what it puts into the carry: compiled steps, snapshots.

`step` counts completed optimizer steps everywhere: after `completed step: 100` the checkpoint of step 100 may follow,
and a run that resumes from it completes step 101 next.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import jax

from trainer import program
from trainer.checkpoint import meta as checkpoint_meta
from trainer.checkpoint.tiers import Tiers
from trainer.cluster import View
from trainer.config import counts
from trainer.config.schema import Config
from trainer.data import Batch, Loader, Prefetcher
from trainer.elastic.attempt import Carry, Outcome
from trainer.observe import chips
from trainer.observe.metrics import StepRecord
from trainer.observe.profiler import Profiler
from trainer.observe.throughput import Throughput
from trainer.program import Program
from trainer.session import Session
from trainer.state import TrainState


class TrainingDiverged(RuntimeError):
  """More steps in a row than max_nonfinite_steps had a non-finite loss or gradient."""


def run(config: Config, session: Session, view: View, carry: Carry) -> Outcome:
  """Trains on the slices of `view` from the newest good state; returns how the attempt ended.

  Raises TrainingDiverged, DataError and CheckpointError where going on makes no sense, and whatever the runtime raises
  when a slice is lost.
  """
  # ---- the program of these slices
  prog = session.program(config, view)
  with session.watchdog.paused():
    compiled = carry.compiled_step(lambda wanted: session.program(config, wanted).compile())

  # ---- the state: snapshot, emergency tier, persistent tier, or fresh
  tiers = session.tiers(config)
  with session.watchdog.paused():
    state, step, tokens = _restore(config, session, prog, tiers, carry)

  # ---- data: step n trains on batch n-1, dealt out to the living slices by the plan
  rows = prog.plan.rows.reshape(-1)
  fetch = lambda index: program.place(session.loader.batch(index, rows), prog.batch)
  prefetch = Prefetcher(fetch, step, config.run.steps, config.data.prefetch_buffer_size)
  records = _Records(config, session, view, carry, step, tokens)
  profiler = Profiler(config.run_directory, config.observe, session.log, session.events)
  session.started(step)

  # ---- the loop
  try:
    for index, batch in prefetch:
      step = index + 1
      profiler.before_step(step - records.first_step, lambda: jax.block_until_ready(state))
      state, metrics = compiled(state, carry.before_step(step, batch))
      records.dispatched(step, metrics, prefetch.waited_seconds)
      if carry.snapshot_due(step):
        carry.snapshot(step, state, records.meta(step))
      if step == records.first_step + 2:
        carry.prepare(lambda wanted: session.program(config, wanted).compile())
      stop = session.preemption.requested(step)
      last = step == config.run.steps
      evaluate = _due(config.observe.eval_interval, step) or (last and config.observe.eval_interval != 0)
      if stop or last or evaluate or tiers.due(step) or carry.wants_resize(step):
        records.finish()
        loss = _evaluate(config, session, prog, state.params, step) if evaluate and not stop else None
        carry.at("save", step) if tiers.due(step) or stop or last else None
        tiers.maybe_save(step, state, records.meta(step), last=stop or last, metric=loss)
      if stop and not last:
        tiers.wait()
        return Outcome("preempted", step)
      if not last and carry.wants_resize(step):
        carry.snapshot(step, state, records.meta(step))
        return Outcome("slice_up", step)
    records.finish()
    tiers.wait()
    session.final_state = state
    return Outcome("complete", step)
  finally:
    prefetch.close()
    profiler.close()
    tiers.close()
