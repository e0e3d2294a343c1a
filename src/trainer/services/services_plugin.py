"""The plug-in of the services: TensorBoard, wandb, metrics objects, and Google's own records."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from trainer.config.schema import ObserveSection
from trainer.observe.log import Log
from trainer.observe.metrics import Recorder, StepRecord, read_metrics
from trainer.run.plugins import Opened, Plugin
from trainer.services.background_writer import BackgroundWriter, Scalars
from trainer.services.goodput_recording import GoodputRecording
from trainer.services.objects import MetricsObjects
from trainer.services.tensorboard import TensorBoard
from trainer.services.wandb_runs import EachStepOnce, ServiceRun, WandbRun

# Field of the record of a step -> name of the scalar in TensorBoard and in the services. Other numbers: learning/FIELD.
_TAGS = {
  "loss": "learning/loss",
  "z_loss": "learning/z_loss",
  "grad_norm": "learning/grad_norm",
  "lr": "learning/learning_rate",
  "tokens": "learning/tokens",
  "weights": "learning/loss_tokens",
  "seconds": "perf/step_seconds",
  "tflops_per_device": "perf/tflops_per_device",
  "tokens_per_second_per_device": "perf/tokens_per_second_per_device",
  "mfu": "perf/mfu",
  "data_wait": "perf/data_wait_seconds",
  "router_load_max": "router/load_max",
  "router_load_min": "router/load_min",
  "router_entropy": "router/entropy",
  "replica_distance": "local_steps/replica_distance",
  "outer_grad_norm": "local_steps/outer_grad_norm",
  "bytes_sent": "local_steps/bytes_sent",
  "eta": "perf/eta_seconds",
  "slices": "elastic/slices",
}
_NO_NUMBERS = {"step", "skipped", "examples", "slice_seconds", "ago", "proof"}
_SCALARS = _TAGS | {
  field.name: f"learning/{field.name}"
  for field in dataclasses.fields(StepRecord)
  if field.name not in _TAGS.keys() | _NO_NUMBERS
}


class Services(Plugin):
  """Sends what a run records to where the configuration asks for it."""

  def open(self, run: Opened, stack: contextlib.ExitStack) -> None:
    super().open(run, stack)
    observe = run.config.observe
    directory, name = run.config.run_directory, run.config.run.run_name
    if observe.sends_to("goodput"):
      begin = functools.partial(GoodputRecording, directory, name, run.log)
      writer = BackgroundWriter("records of goodput", begin, run.log, "training goes on", waits=False)
      stack.callback(writer.join)
      stack.callback(writer.close, None)
      run.events.subscribe(lambda record: writer.put(lambda recording: recording.record(record)))
    if observe.sends_to("checkpoint_logger") and run.cluster.is_primary:
      from trainer.services.cloud_logger import CheckpointTimings

      stack.enter_context(CheckpointTimings(directory, name, run.log))

  def recorders(self) -> list[Recorder]:
    opened, config = self.run, self.config
    run = ServiceRun(config.run.run_name, opened.run_id, config.flat())
    return list(recorders(config.run_directory, config.observe, opened.events.process, opened.log, run))


def recorders(directory: str, cfg: ObserveSection, process: str, log: Log, run: ServiceRun) -> Iterator[Recorder]:
  """One for each destination that `cfg` asks for. Its library is imported at the first write. process: in the names of
  files, so that two processes never write the same one."""
  if cfg.sends_to("tensorboard"):
    board = functools.partial(TensorBoard, f"{directory}/tensorboard", process)
    remedy = "services without tensorboard turns them off"
    yield Numbers(BackgroundWriter("TensorBoard files", board, log, remedy, waits=True))
  if cfg.sends_to("gcs_metrics"):
    store = functools.partial(MetricsObjects, f"{directory}/metrics", cfg.log_period, log)
    remedy = "metrics.jsonl has all records"
    yield Lines(BackgroundWriter("metrics objects", store, log, remedy, waits=False))
  if cfg.sends_to("wandb"):
    begin = functools.partial(WandbRun, directory, run, log)
    once = functools.partial(EachStepOnce, begin, functools.partial(service_rows, directory))
    remedy = "training goes on; a process that resumes the run sends what is missing"
    yield Numbers(BackgroundWriter("records in wandb", once, log, remedy, waits=False))


class Numbers:
  """A Recorder: the numbers of each record, for a writer."""

  def __init__(self, writer: BackgroundWriter) -> None:
    self._writer = writer
    self.flush, self.close, self.join = writer.flush, writer.close, writer.join

  def write(self, fields: dict[str, Any], line: str) -> None:
    is_step = "loss" in fields
    scalars = _scalars(fields) if is_step else _eval_scalars(fields)
    self._writer.write(fields["step"], scalars, fields["wall"], is_step=is_step)


class Lines(Numbers):
  """A Recorder: the records of completed steps as they are, for the writer of MetricsObjects."""

  def write(self, fields: dict[str, Any], line: str) -> None:
    if "loss" in fields:
      self._writer.put(lambda objects: objects.add(fields["step"], line))


def _scalars(fields: dict[str, Any]) -> Scalars:
  """The numbers of a step for TensorBoard and services, from its record; numbers that are not known are left out."""
  return {tag: float(fields[key]) for key, tag in _SCALARS.items() if fields.get(key) is not None}


def _eval_scalars(fields: dict[str, Any]) -> Scalars:
  """The numbers of an evaluation for TensorBoard and services, from its record; none from another record."""
  found = {"evaluation/loss": fields["eval_loss"]} if "eval_loss" in fields else {}
  return found | {f"evaluation/loss of {name}": value for name, value in fields.get("eval_losses", {}).items()}


def service_rows(run_directory: str) -> Iterator[tuple[int, Scalars, Scalars]]:
  """The history of the run for EachStepOnce."""
  for record in read_metrics(run_directory):
    if "loss" in record:
      yield int(record["step"]), _scalars(record), _eval_scalars(record)
