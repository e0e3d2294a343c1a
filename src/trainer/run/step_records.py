"""One record per step: the log line, metrics.jsonl, the progress display, the watchdog; and what a bad step means."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import jax
import numpy as np

from input_pipeline.tally import Tally
from stepcost import chips
from trainer.checkpoint.arrays import fingerprint, state_tree
from trainer.checkpoint.arrays.fingerprint import Started
from trainer.config import counts
from trainer.elastic.wait import Wait
from trainer.observe.metrics import StepRecord
from trainer.observe.throughput import Throughput
from trainer.program import step as step_lib
from trainer.program.state import TrainState
from trainer.run.driver import Driver, Metrics, on_host
from trainer.run.session import Session


class TrainingDiverged(RuntimeError):
  """More steps in a row than max_nonfinite_steps had a loss or gradient that was not finite."""


@dataclasses.dataclass(frozen=True)
class _Dispatched:
  """What the driver has said of a step, or of a round of local steps that ends with `step`."""

  step: int
  metrics: Metrics
  data_wait: float
  slice_seconds: dict[str, float] | None
  proof: dict[str, Any]
  prints: Started
  tally: Any
  of_round: dict[str, float]


class StepRecords:
  """Records each step after the next one is dispatched, so that the devices never wait for the host."""

  def __init__(self, session: Session, driver: Driver, wait: Wait, device: jax.Device) -> None:
    """device: one of those that the driver computes on."""
    config = session.config
    self._session, self._driver, self._wait = session, driver, wait
    self._limit = config.optimizer.max_nonfinite_steps
    self._has_z_loss = config.optimizer.z_loss_multiplier > 0
    chip = chips.find(device.device_kind)
    self._throughput = Throughput(
      flops_per_token=counts.flops_per_token(config.model, config.data.max_target_length),
      tokens_per_step=session.data.tokens_per_step,
      total_steps=config.run.steps,
      peak_flops=chip.peak_flops if chip else None,
    )
    self._pending: _Dispatched | None = None
    self._last = time.monotonic()
    self.skipped = 0  # steps in a row up to the last recorded one whose update was not finite

  def restart_clock(self) -> None:
    """The next step's time counts from now: evaluations and saves are no part of it."""
    self._last = time.monotonic()

  def dispatched(self, step: int, metrics: Metrics, state: TrainState) -> None:
    """`step` has been dispatched. Waits for the step before it and records that one. state: after `step`, for a digest
    of it; its buffers may be donated after the call. With local steps: the round that ends with `step`."""
    self.finish()
    prints = fingerprint.dispatch(state_tree.flatten(state) if self._is_digested(step) else {})
    driver = self._driver
    waits, of_slices = driver.data_wait_seconds, driver.slice_seconds
    self._pending = _Dispatched(step, metrics, waits, of_slices, driver.proof, prints, driver.tally, driver.of_round)

  def _is_digested(self, step: int) -> bool:
    """Whether the receipt has a digest of the state after `step`: regularly, for each checkpoint, and at the end."""
    saves, period = self._session.config.checkpoint, self._session.config.observe.receipt_state_period
    saved = saves.enable_checkpointing and step % saves.checkpoint_period == 0
    due = period > 0 and step // period > (step - self._session.config.optimizer.local_steps) // period
    return period > 0 and (due or saved or step == self._session.config.run.steps)

  def finish(self) -> None:
    """Waits for the last dispatched step and records it. Raises the runtime's error if the step failed."""
    if self._pending is None:
      return
    done, self._pending = self._pending, None
    last, proof = done.step, done.proof
    given = done.metrics, done.prints.values, done.tally
    arrays, sums, tallies = self._wait.call(lambda: on_host(given), f"step {last}")
    steps = np.reshape(arrays, (-1, np.shape(arrays)[-1]))  # of a round; a synchronous step is one
    now, count = time.monotonic(), len(steps)
    seconds, self._last = (now - self._last) / count, now
    state = {"state": fingerprint.collect(Started(done.prints.names, sums))[0]} if done.prints.names else {}
    of_slices = done.slice_seconds and {name: taken / count for name, taken in done.slice_seconds.items()}
    each = dataclasses.replace(done, data_wait=done.data_wait / count, slice_seconds=of_slices)
    for left, values, tally in zip(range(count - 1, -1, -1), steps, np.reshape(tallies, (count, -1)), strict=True):
      if self._session.config.observe.receipt_state_period:
        proof = done.proof | {"examples": Tally.of_sum(tally).hex} | (state if not left else {})
      ago = time.monotonic() - now + left * seconds if count > 1 else 0.0
      self._record(each, last - left, values, proof, seconds, ago)
    self._session.watchdog.step_done(last)

  def _record(
    self, done: _Dispatched, step: int, metrics: np.ndarray, proof: dict[str, Any], seconds: float, ago: float
  ) -> None:
    """Records one of the steps of `done`. seconds: that it took. ago: see StepRecord."""
    values = step_lib.metric_values(metrics)
    alive = self._driver.alive
    rates = self._throughput.rates(seconds, alive * self._session.cluster.devices_per_slice)
    self.skipped = skipped = int(values.pop("skipped"))
    if not self._has_z_loss:
      del values["z_loss"]
    record = StepRecord(
      step=step,
      seconds=seconds,
      tokens=self._session.data.tokens(step),
      slices=alive,
      data_wait=done.data_wait,
      tflops_per_device=rates.tflops_per_device,
      tokens_per_second_per_device=rates.tokens_per_second_per_device,
      mfu=rates.mfu,
      eta=self._throughput.eta(step, seconds),
      skipped=skipped > 0,
      examples=self._session.data.train.examples_by_source(step) or None,
      slice_seconds=done.slice_seconds,
      ago=ago,
      proof=proof,
      **values,
      **(done.of_round if step == done.step else {}),
    )
    self._session.progress.step(record)
    self._session.metrics.write(record)
    self._session.elastic.completed(step, seconds, alive)
    self._session.snapshots.confirm(step)
    if skipped:
      self._nonfinite(record, skipped)

  def warn_if_skipped(self, step: int) -> None:
    """Warns if the run ends after `step` with updates that were skipped."""
    if self.skipped:
      self._session.log.warning(
        f"the last {self.skipped} steps were skipped, because their loss or gradient was not finite: the weights are "
        f"those of step {step - self.skipped}. Change the learning rate, the data or the model before you continue"
      )

  def _nonfinite(self, record: StepRecord, skipped: int) -> None:
    self._session.events.emit("nonfinite", step=record.step, loss=record.loss, grad_norm=record.grad_norm)
    text = f"step {record.step}: loss {record.loss} and gradient norm {record.grad_norm} are not both finite"
    if skipped > self._limit:
      raise TrainingDiverged(
        f"{text} ({skipped} in a row, max_nonfinite_steps={self._limit}). The weights are those before the first of "
        "these steps. Lower learning_rate, lower gradient_clipping_threshold, or look at the data."
      )
    self._session.log.warning(f"{text}; the update is skipped ({skipped} in a row, {self._limit} allowed)")
