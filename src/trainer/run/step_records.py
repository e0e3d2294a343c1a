"""One record per step: the log line, metrics.jsonl, the progress display, the watchdog; and what a bad step means."""

from __future__ import annotations

import time
from typing import Any

import jax

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


class StepRecords:
  """Records each step after the next one is dispatched, so that the devices never wait for the host."""

  def __init__(self, session: Session, driver: Driver, wait: Wait, device: jax.Device) -> None:
    """device: one of those that the driver computes on."""
    config = session.config
    self._config, self._session, self._driver, self._wait = config, session, driver, wait
    self._limit = config.optimizer.max_nonfinite_steps
    self._has_z_loss = config.optimizer.z_loss_multiplier > 0
    chip = chips.find(device.device_kind)
    self._throughput = Throughput(
      flops_per_token=counts.flops_per_token(config.model, config.data.max_target_length),
      tokens_per_step=session.data.tokens_per_step,
      total_steps=config.run.steps,
      peak_flops=chip.peak_flops if chip else None,
    )
    self._pending: tuple[int, Metrics, float, dict[str, float] | None, dict[str, Any], Started, Any] | None = None
    self._last = time.monotonic()
    self.skipped = 0  # steps in a row up to the last recorded one whose update was not finite

  def restart_clock(self) -> None:
    """The next step's time counts from now: evaluations and saves are no part of it."""
    self._last = time.monotonic()

  def dispatched(self, step: int, metrics: Metrics, state: TrainState) -> None:
    """`step` has been dispatched. Waits for the step before it and records that one. state: after `step`, for a digest
    of it; its buffers may be donated after the call."""
    self.finish()
    prints = fingerprint.dispatch(state_tree.flatten(state) if self._is_digested(step) else {})
    driver = self._driver
    self._pending = (step, metrics, driver.data_wait_seconds, driver.slice_seconds, driver.proof, prints, driver.tally)

  def _is_digested(self, step: int) -> bool:
    """Whether the receipt has a digest of the state after `step`: regularly, for each checkpoint, and at the end."""
    saves, period = self._config.checkpoint, self._config.observe.receipt_state_period
    saved = saves.enable_checkpointing and step % saves.checkpoint_period == 0
    return period > 0 and (step % period == 0 or saved or step == self._config.run.steps)

  def finish(self) -> None:
    """Waits for the last dispatched step and records it. Raises the runtime's error if the step failed."""
    if self._pending is None:
      return
    (step, arrays, data_wait, slice_seconds, proof, prints, tally), self._pending = self._pending, None
    arrays, sums, tally = self._wait.call(lambda: on_host((arrays, prints.values, tally)), f"step {step}")
    values = step_lib.metric_values(arrays)
    if self._config.observe.receipt_state_period:
      proof = proof | {"examples": Tally.of_sum(tally).hex}
    if prints.names:
      proof = proof | {"state": fingerprint.collect(Started(prints.names, sums))[0]}
    now = time.monotonic()
    seconds, self._last = now - self._last, now
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
      data_wait=data_wait,
      tflops_per_device=rates.tflops_per_device,
      tokens_per_second_per_device=rates.tokens_per_second_per_device,
      mfu=rates.mfu,
      eta=self._throughput.eta(step, seconds),
      skipped=skipped > 0,
      examples=self._session.data.train.examples_by_source(step) or None,
      slice_seconds=slice_seconds,
      proof=proof,
      **values,
    )
    self._session.progress.step(record)
    self._session.metrics.write(record)
    self._session.watchdog.step_done(step)
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
