"""What belongs to the process and not to one set of living slices: records, data, the watchdog, the signal handler."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trainer import program
from trainer import world as world_lib
from trainer.checkpoint.arrays import state_tree
from trainer.checkpoint.preemption import Preemption
from trainer.checkpoint.snapshot import Snapshots
from trainer.cluster import Cluster, View
from trainer.config import cli, counts
from trainer.config.schema import Config
from trainer.data import Loader, describe, make_loader
from trainer.data.loader import Split
from trainer.observe import environment, files, lock
from trainer.observe import log as log_lib
from trainer.observe.events import EventLog
from trainer.observe.log import Log
from trainer.observe.metrics import Metrics
from trainer.observe.progress import Progress
from trainer.observe.watchdog import Watchdog
from trainer.program import Program
from trainer.report import goodput
from trainer.signals import Signals
from trainer.world import World

CONFIG_FILE = "config.yml"


@dataclasses.dataclass
class Session:
  """The run's open records and data, shared by all attempts of this process."""

  log: Log
  events: EventLog
  metrics: Metrics
  progress: Progress
  watchdog: Watchdog
  signals: Signals
  preemption: Preemption
  snapshots: Snapshots
  loader: Loader
  eval_loader: Loader | None
  global_batch_size: int  # examples per step, fixed for the life of the run
  tokens_per_step: int
  state_bytes: int  # of one full copy of parameters and optimizer state
  identity: dict[str, Any]  # which data, in what order: what a checkpoint says and a resume compares
  world: World
  started: float  # time.monotonic() at the start of the process or of the current attempt
  programs: dict[tuple[int, ...], Program]  # by View.slices
  attempts: int = 0
  was_ready: bool = False
  tokens_before: int = 0  # what steps of another batch size had more, or (below 0) less

  def begin(self) -> None:
    """An attempt begins. The first one began with the process."""
    self.attempts += 1
    if self.attempts > 1:
      self.started = time.monotonic()
      gc.enable()  # it is still off if the first one was never ready; what a lost attempt held must be collected

  def resume(self, step: int, meta: Mapping[str, Any] | None) -> None:
    """The attempt goes on after `step`, of whose state `meta` tells (None: a fresh start): with the next example.

    That matters where the batch size has changed; the examples of other data have other numbers.
    """
    next_example = step * self.global_batch_size
    if meta is not None and meta["identity"].get("data") == self.identity["data"]:
      next_example = meta["cursor"]["next_example"]
    self.loader.resume(step, next_example)
    self.tokens_before = meta["tokens"] - step * self.tokens_per_step if meta is not None else 0

  def tokens(self, step: int) -> int:
    """Tokens that the run has been trained on after `step`."""
    return self.tokens_before + step * self.tokens_per_step

  def program(self, config: Config, view: View) -> Program:
    """The program for the slices of `view`, built once."""
    if view.slices not in self.programs:
      self.programs[view.slices] = program.build(config, view.devices, view.num_slices_total)
    return self.programs[view.slices]

  def ready(self, config: Config, step: int) -> None:
    """The next step can be dispatched; says how long that took.

    Now and not before the checkpoint has accepted it, the configuration becomes the run's: {run}/config.yml.
    """
    now = time.monotonic()
    if self.world.is_primary and not self.was_ready:
      files.write_text(config.run_directory, CONFIG_FILE, cli.print_config(config))
    self.was_ready = True
    self.events.emit("init_done", step=step, seconds=now - self.started)
    self.watchdog.beat(step)
    self.signals.running()
    if not gc.isenabled():
      # Off since the process began (see __main__): what importing and tracing made stays, so that collections in the
      # loop need not look at it.
      gc.freeze()
      gc.enable()

  def finish(self, config: Config, code: int) -> None:
    """Records the end of the process with its exit code; of a complete run also goodput and the report."""
    self.events.emit("run_end", exit=code)
    for record in (self.progress, self.metrics, self.events):
      record.close()
    if not self.world.is_primary:
      return
    if config.observe.enable_pathways_goodput:
      goodput.write_or_warn(config.run_directory, self.log)
    if code == 0 and config.observe.enable_report:
      from trainer.report import page  # matplotlib: seconds to import

      page.write_or_warn(config.run_directory, self.log)


def enable_compilation_cache(directory: str) -> None:
  """Lets XLA keep compiled programs in `directory` (empty: not at all), so that the next start need not compile."""
  import jax

  if directory:
    jax.config.update("jax_compilation_cache_dir", os.path.expanduser(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


@contextlib.contextmanager
def open_session(config: Config, cluster: Cluster, signals: Signals, started: float) -> Iterator[Session]:
  """Checks that the program fits the devices, opens the data and the run's folder, and closes all at the end.

  Raises ValueError for what the user can mend, before the run's folder is created.
  """
  full = cluster.view(cluster.slices)
  programs = {full.slices: program.build(config, full.devices, full.num_slices_total)}
  batch = program.global_batch_size(config, cluster.num_slices, cluster.devices_per_slice)
  with contextlib.ExitStack() as stack:
    prepared: list[str] = []  # what the loaders have to say, until there is a log to keep it

    def load(split: Split) -> Loader:
      vocab_size = config.model.vocab_size
      loader = make_loader(
        config.data, vocab_size=vocab_size, global_batch_size=batch, split=split, log=prepared.append
      )
      stack.callback(loader.close)
      return loader

    loader = load("train")
    eval_loader = load("eval") if _evaluates(config, loader, prepared.append) else None
    directory = config.run_directory
    world = cluster.world
    log = log_lib.get(directory, world)
    stack.callback(log.close)
    if world.is_primary:  # one that was told to stop may take its whole grace period
      stack.enter_context(lock.alone(directory, config.checkpoint.autocheckpoint_grace_seconds, log.line))
    events = EventLog(directory, config.run.run_name, world)
    stack.callback(events.close)
    metrics = Metrics(directory if world.is_primary else None, config.observe, events, log)
    stack.callback(metrics.close)
    progress = Progress(
      log,
      total_steps=config.run.steps,
      total_slices=cluster.num_slices,
      log_period=config.observe.log_period,
      terminal=None if world.is_primary else False,
    )
    if world.is_primary and config.checkpoint.enable_checkpoint_cloud_logger:
      from trainer.observe.cloud_logger import CheckpointTimings

      stack.enter_context(CheckpointTimings(directory, config.run.run_name, log))
    watchdog = Watchdog(config.observe.watchdog_timeout_seconds, log, events)
    stack.callback(watchdog.stop)
    snapshots = Snapshots(world_lib.of_jax(), log.line, events.emit)
    stack.callback(snapshots.close)
    signals.on_exit = functools.partial(_record_exit, events)
    preemption = Preemption(config.checkpoint, world, signals, log.line, events.emit)
    session = Session(
      log=log,
      events=events,
      metrics=metrics,
      progress=progress,
      watchdog=watchdog,
      signals=signals,
      preemption=preemption,
      snapshots=snapshots,
      loader=loader,
      eval_loader=eval_loader,
      global_batch_size=batch,
      tokens_per_step=batch * config.data.max_target_length,
      state_bytes=state_tree.state_bytes(programs[full.slices].state),
      # Read once: a save must not depend on the data's being readable at that time.
      identity={"data": loader.fingerprint(), "global_batch_size": batch},
      world=world,
      started=started,
      programs=programs,
    )
    for line in prepared:
      log.line(line)
    _announce(config, session, cluster, programs[full.slices])
    stack.enter_context(progress)
    watchdog.start()
    yield session


def _record_exit(events: EventLog, code: int) -> None:
  events.emit("run_end", exit=code)
  events.flush()


def _evaluates(config: Config, loader: Loader, say: Callable[[str], None]) -> bool:
  """Whether the run evaluates. If it is not asked for: where there is text to evaluate on, not random tokens."""
  data, observe = config.data, config.observe
  if observe.eval_steps == 0 or observe.eval_interval > 0 or data.eval_dataset_path:
    return observe.eval_steps > 0
  if not loader.has_eval:
    say(f"No evaluation: nothing is held out (eval_fraction={data.eval_fraction:g}; of a single line nothing can be).")
  return loader.has_eval and data.dataset_type != "synthetic"


def _announce(config: Config, session: Session, cluster: Cluster, full: Program) -> None:
  """Prints what is about to run, and records it as the first event of the process."""
  import jax

  device = full.mesh.devices.flat[0]
  model, length = config.model, config.data.max_target_length
  parameters = counts.parameter_count(model)
  data = session.loader.describe(config.run.steps)
  mesh = ", ".join(f"{axis}={size}" for axis, size in full.mesh.shape.items() if size > 1) or "one device"
  lines = [
    f"Run {config.run_directory}: {config.run.steps} steps of {session.global_batch_size} x {length} tokens",
    f"Model {model.model_name}: {parameters:,} parameters, {model.num_decoder_layers} layers, "
    f"remat_policy={model.remat_policy}, {model.dtype}",
    f"Devices: {cluster.num_slices} slice{'s' * (cluster.num_slices > 1)} of {cluster.devices_per_slice} "
    f"{device.device_kind} ({cluster.kind}), "
    f"mesh {mesh}, jax {jax.__version__}",
    f"Attention: {full.attention.name} ({full.attention.reason})",
    describe.line(data),
    *_losses_to_beat(session, model.vocab_size),
  ]
  for line in lines:
    session.log.line(line)
  if warning := describe.vocabulary_warning(data, model.vocab_size):
    session.log.warning(warning)
  if config.run.log_config:
    _print_config(config, session.log)
  session.events.emit(
    "run_start",
    steps=config.run.steps,
    num_slices=cluster.num_slices,
    devices=cluster.num_slices * cluster.devices_per_slice,
    devices_per_slice=cluster.devices_per_slice,
    platform=device.platform,
    device_kind=device.device_kind,
    global_batch_size=session.global_batch_size,
    tokens_per_step=session.tokens_per_step,
    parameters=parameters,
    flops_per_token=counts.flops_per_token(model, length),
    vocab_size=model.vocab_size,
    data=data,
    unigram_entropy=session.loader.unigram_entropy(),
    unigram_eval_loss=session.loader.unigram_eval_loss(),
    config=config.flat(),
    **environment.describe(),
  )


def _losses_to_beat(session: Session, vocab_size: int) -> list[str]:
  """A line that says what the loss is worth, where the data knows."""
  unigram, unigram_eval = session.loader.unigram_entropy(), session.loader.unigram_eval_loss()
  if unigram is None:
    return []
  line = f"Losses to beat: {math.log(vocab_size):.2f} of a guess (ln V), {unigram:.2f} of the tokens' frequencies alone"
  return [line if unigram_eval is None else f"{line} ({unigram_eval:.2f} in evaluation)"]


def _print_config(config: Config, log: Log) -> None:
  """Prints the keys that are not at their default, and where all of them will be (see `Session.ready`)."""
  defaults = Config().flat()
  chosen = {key: value for key, value in config.flat().items() if value != defaults[key]}
  log.line(f"Configuration (every key goes to {config.run_directory}/{CONFIG_FILE}; not at their default):")
  for key, value in chosen.items():
    log.line(f"  {key}: {value}")
