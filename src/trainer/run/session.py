"""What belongs to the process rather than to one set of living slices: records, data, programs, watchdog, signals."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from input_pipeline import remote
from trainer import world as world_lib
from trainer.checkpoint import disk_space, run_id
from trainer.checkpoint.arrays import fingerprint, state_tree
from trainer.checkpoint.errors import CheckpointError
from trainer.checkpoint.preemption import Preemption
from trainer.checkpoint.snapshot import Snapshots
from trainer.checkpoint.step_folders import StepFolders
from trainer.checkpoint.together import on_primary
from trainer.cluster import Cluster
from trainer.config import cli, counts, faults
from trainer.config.errors import ConfigError
from trainer.config.files import CONFIG_FILE
from trainer.config.schema import Config
from trainer.elastic import flips
from trainer.elastic.program_cache import CachedProgram, ProgramCache
from trainer.observe import environment, files, lock
from trainer.observe import log as log_lib
from trainer.observe.compiles import CompileCounter
from trainer.observe.events import EventLog
from trainer.observe.log import Log
from trainer.observe.metrics import Metrics, StepRecord
from trainer.observe.progress import Progress
from trainer.observe.watchdog import Watchdog
from trainer.parallel import memory
from trainer.process.signals import Signals
from trainer.program import program
from trainer.program.optimizers import NO_OVERRIDES, UserOptimizer
from trainer.program.program import Program
from trainer.run import run_data
from trainer.run.announce import announce, next_commands
from trainer.run.plugins import NO_EXTENSIONS, Extensions, Opened, Plugins, Weights
from trainer.run.run_data import RunData
from trainer.world import SINGLE_WORLD


@dataclasses.dataclass
class Session:
  """The run's open records and data, shared by all attempts of this process."""

  cluster: Cluster
  log: Log
  events: EventLog
  metrics: Metrics
  progress: Progress
  data: RunData
  programs: ProgramCache[Program]
  snapshots: Snapshots
  signals: Signals
  preemption: Preemption
  watchdog: Watchdog
  plugins: Plugins
  state_bytes: int  # of one full copy of parameters and optimizer state
  units_per_slice: int  # of work in a step of the full topology: see elastic/batch_plan.py
  run_id: str  # of checkpoint.run_id.establish; "" without checkpoints
  holds_folder: Callable[[], bool]  # of lock.held
  parameters: Callable[[], Weights] | None  # that a new run starts from; None: random ones
  started: float  # time.monotonic() at the start of the process or of the current attempt
  attempts: int = 0
  was_ready: bool = False
  wrote_config: bool = False

  def begin(self) -> None:
    """An attempt begins. The first attempt began with the process."""
    self.attempts += 1
    if self.attempts > 1:
      self.started = time.monotonic()
      gc.enable()  # still off if the first attempt was never ready; a lost attempt's objects must be collected

  def ready(self, config: Config, step: int) -> None:
    """The next step can be dispatched: records how long that took. Writes {run}/config.yml, only now, because before,
    the checkpoint could have refused it."""
    now = time.monotonic()
    if self.cluster.coordination.is_primary and not self.was_ready:
      self._write_config(config)
      self.plugins.ready()
    self.was_ready = True
    self.events.emit("init_done", step=step, seconds=now - self.started)
    self.watchdog.step_done(step)
    self.signals.running()
    if not gc.isenabled():
      # Off since the process began (see __main__). The objects of imports and tracing stay, so collections in the loop
      # need not visit them. What a program that uses the library has frozen cannot be told apart from them later.
      if not gc.get_freeze_count():
        gc.freeze()
      gc.enable()

  def _write_config(self, config: Config) -> None:
    """Writes {run}/config.yml; `finish` tries again if storage fails: what trains is in memory."""
    try:
      files.write_text(config.run_directory, CONFIG_FILE, cli.print_config(config))
      self.wrote_config = True
    except OSError as error:
      self.log.warning(f"{error}. Training goes on, and the end of the run tries again")

  def change_role(self, config: Config, is_primary: bool) -> None:
    """This process now is the primary, or no longer is: begins or ends the writing of the run's files. A new primary
    also records the steps that the primary before it has not recorded."""
    if not is_primary:
      for record in (self.metrics, self.events, self.log):
        record.hand_over()
      return
    try:
      self.require_folder(config, f"the records after step {self.metrics.last_step} could not be taken over")
    except OSError as error:  # storage fails now: the records wait in memory
      print(f"warning: {error}", file=sys.stderr)
    waited = self.metrics.seconds_since_last_record
    self.log.take_over(config.run_directory)
    self.events.take_over(config.run_directory)
    for missing in self.metrics.take_over():
      self.progress.step(missing)
    self.events.emit("primary", step=self.metrics.last_step, host=environment.host(), seconds=waited)

  def require_folder(self, config: Config, what: str) -> None:
    """Raises CheckpointError, which begins with `what`, if the run's folder was moved or is another run's now."""
    if self.run_id:
      run_id.require(config.run_directory, self.run_id, what)
    if not self.holds_folder():
      raise CheckpointError(f"{what}: {config.run_directory} was moved or deleted, or another launch uses it now")

  def finish(self, config: Config, code: int, *, is_command: bool = False) -> None:
    """Records the end of the process with its exit code; for a complete run also what plug-ins add, and, unless a
    program has started it (is_command), what to do with the run next."""
    self.events.emit("run_end", exit=code)
    self.progress.close()
    self.metrics.close(code)
    self.events.close()
    if not self.cluster.coordination.is_primary:
      return
    try:
      self.require_folder(config, "No report is written")
      if self.was_ready and not self.wrote_config:
        self._write_config(config)
      if config.checkpoint.enable_checkpointing:
        _name_rejected(config.run_directory, self.log)
    except (CheckpointError, OSError) as error:
      if code == 0:  # otherwise the reason of the end says more
        self.log.warning(str(error))
      return
    self.plugins.ends(code)
    if code == 0 and is_command:
      self.log.line("\n".join(["Next:", *next_commands(config, self.cluster, self.data)]))


@dataclasses.dataclass(frozen=True)
class LibraryOverrides:
  """What the caller of the library gives in the place of keys: a source to train on, functions that get the record of
  each step, a schedule and an optimizer. With the extensions of the command or the library."""

  source: Any = None
  callbacks: tuple[Callable[[StepRecord], object], ...] = ()
  user_optimizer: UserOptimizer = NO_OVERRIDES
  extensions: Extensions = NO_EXTENSIONS


NO_LIBRARY_OVERRIDES = LibraryOverrides()


@contextlib.contextmanager
def open_session(
  config: Config,
  cluster: Cluster,
  signals: Signals,
  started: float,
  origins: Mapping[str, str] | None = None,
  overrides: LibraryOverrides = NO_LIBRARY_OVERRIDES,
) -> Iterator[Session]:
  """Checks that the program fits the devices, opens the data and the run's folder, and closes all at the end. origins:
  where each key was given, for the report. Raises ConfigError for wrong input, before the run's folder is created."""
  full_program = _full_program(config, cluster, overrides)
  abstract = full_program.state
  named = state_tree.flatten(abstract.params), state_tree.flatten(abstract.opt_state)
  flips.check(faults.parse(config.elastic.fault_injection), *named)
  batch = program.global_batch_size(config, cluster.num_slices, cluster.devices_per_slice)
  parameters = _parameters(config, cluster, overrides.extensions)
  with contextlib.ExitStack() as stack:
    notes = overrides.user_optimizer.lines()  # for the log, which is not open yet
    data = stack.enter_context(run_data.open_data(config, batch, notes.append, overrides.source))
    data.identify(overrides.user_optimizer.identity(full_program.state.opt_state))
    plugins = Plugins([plugin(config, data) for plugin in overrides.extensions.plugins])
    log = _log(config, cluster, stack)
    holds_folder = stack.enter_context(_lock(config, cluster, log))
    events = _events(config, cluster, stack)
    identity = _identity(config, cluster)
    plugins.open(Opened(config, cluster, data, log, events, identity), stack)
    metrics = _metrics(config, cluster, events, plugins, stack)
    metrics.callbacks += overrides.callbacks
    progress = _progress(config, cluster, log)
    watchdog = _watchdog(config, cluster, signals, log, events, stack)
    snapshots = stack.enter_context(contextlib.closing(Snapshots(cluster.world, log.line, events.emit)))
    preemption = _preemption(config, cluster, signals, log, events)
    programs = _program_cache(config, cluster, full_program, data, events, log, stack)
    session = Session(
      cluster,
      log,
      events,
      metrics,
      progress,
      data,
      programs,
      snapshots,
      signals,
      preemption,
      watchdog,
      plugins,
      state_tree.state_bytes(full_program.state),
      full_program.plan.units,
      identity,
      holds_folder,
      parameters,
      started,
    )
    for line in notes:
      log.line(line)
    cluster.coordination.on_role(functools.partial(session.change_role, config))
    announce(config, cluster, full_program, data, log, events, origins or {})
    stack.enter_context(progress)
    watchdog.start()
    yield session


def _full_program(config: Config, cluster: Cluster, overrides: LibraryOverrides) -> Program:
  """The program of all slices. Raises ConfigError if the run would not fit this machine or its disks, and
  CheckpointError if its store does not answer."""
  on_primary(cluster.world, lambda: remote.require_bucket(config.run_directory, config.run_directory))
  full_program = program.of_view(config, cluster.view(cluster.slices), overrides.user_optimizer)
  memory.require_fit(full_program.state, counts.parameter_count(config.model), cluster.kind)
  disk_space.require_locks(config)
  return full_program


def _log(config: Config, cluster: Cluster, stack: contextlib.ExitStack) -> Log:
  log = log_lib.get(config.run_directory, is_primary=cluster.coordination.is_primary)
  stack.callback(log.close)
  return log


def _preemption(config: Config, cluster: Cluster, signals: Signals, log: Log, events: EventLog) -> Preemption:
  agreed, asked = cluster.coordination.stop_agreed, cluster.coordination.stop_asked
  return Preemption(config.checkpoint, cluster.world, signals, log.line, events.emit, agreed, asked)


def _parameters(config: Config, cluster: Cluster, extensions: Extensions) -> Callable[[], Weights] | None:
  """Opens the source of load_parameters_path at its first call. A new run opens it now, and checks it."""
  place, open_weights = config.run.load_parameters_path, extensions.open_weights
  if not place:
    return None
  if open_weights is None:
    raise ConfigError(f"load_parameters_path={place}: this program reads no weights.\nStart it as python -m trainer.")

  @functools.cache
  def opened() -> Weights:
    source = open_weights(place, cluster.world)
    source.check(config.model)
    return source

  begun = cluster.world.is_primary and (run_id.folder(config.run_directory) / run_id.FILE).exists()
  if not world_lib.from_primary(cluster.world, begun):
    opened()
  return opened


def _name_rejected(run_directory: str, log: Log) -> None:
  """Logs the damaged checkpoints that the run keeps. Raises CheckpointError or OSError if they cannot be listed."""
  if found := StepFolders(f"{run_directory}/checkpoints", SINGLE_WORLD, log.line).rejected():
    names = "; ".join(f"{path} ({reason})" for path, reason in found.items())
    log.line(f"Damaged checkpoints are kept: {names}. Delete them if nobody wants to look at them.")


def _lock(config: Config, cluster: Cluster, log: Log) -> contextlib.AbstractContextManager[Callable[[], bool]]:
  """The lock of the run's folder, where this process writes the run's files now, or may one day."""
  if not cluster.coordination.is_primary and not cluster.coordination.has_peers:
    return contextlib.nullcontext(lambda: True)
  grace = config.checkpoint.autocheckpoint_grace_seconds  # that a predecessor which is stopping may need
  launch, joins = cluster.coordination.fresh_run_id or secrets.token_hex(6), cluster.coordination.joins
  return lock.held(config.run_directory, launch, grace, log.line, joins=joins)


def _identity(config: Config, cluster: Cluster) -> str:
  """The id of the run; "" without checkpoints."""
  if not config.checkpoint.enable_checkpointing:
    return ""
  return run_id.establish(config.run_directory, cluster.world, cluster.coordination.fresh_run_id)


def _metrics(
  config: Config, cluster: Cluster, events: EventLog, plugins: Plugins, stack: contextlib.ExitStack
) -> Metrics:
  """The metrics, closed with `stack`."""
  metrics = Metrics(
    config.run_directory,
    events,
    is_primary=cluster.coordination.is_primary,
    recorders=plugins.recorders,
    in_thread=cluster.coordination.has_peers,  # one controller writes a record while the devices compute
  )
  stack.callback(metrics.close)
  return metrics


def _events(config: Config, cluster: Cluster, stack: contextlib.ExitStack) -> EventLog:
  """The event log, closed with `stack`."""
  events = EventLog(config.run_directory, config.run.run_name, is_primary=cluster.coordination.is_primary)
  stack.callback(events.close)
  return events


def _watchdog(
  config: Config, cluster: Cluster, signals: Signals, log: Log, events: EventLog, stack: contextlib.ExitStack
) -> Watchdog:
  """The watchdog, stopped with `stack`. The other worlds learn what this process does; without them its hangs end."""
  recovers = config.elastic.elastic_enabled and cluster.recovers_in_process
  watchdog = Watchdog(config.observe.watchdog_timeout_seconds, log, events, recovers=recovers)
  stack.callback(watchdog.stop)
  signals.record_exit(functools.partial(_record_exit, events))
  limit = functools.partial(watchdog.set_timeout, config.elastic.elastic_timeout_seconds, "elastic_timeout_seconds")
  cluster.coordination.watch(
    busy=lambda: watchdog.operation or log.operation, noticed=lambda: signals.noticed, unsupervised=limit
  )
  return watchdog


def _record_exit(events: EventLog, code: int) -> None:
  events.emit("run_end", exit=code)
  events.flush()


def _progress(config: Config, cluster: Cluster, log: Log) -> Progress:
  return Progress(
    log,
    total_steps=config.run.steps,
    total_slices=cluster.num_slices,
    log_period=config.observe.log_period,
    eval_interval=config.observe.eval_interval,
    terminal=None if cluster.coordination.is_primary else False,
  )


def _program_cache(
  config: Config,
  cluster: Cluster,
  full_program: Program,
  data: RunData,
  events: EventLog,
  log: Log,
  stack: contextlib.ExitStack,
) -> ProgramCache[Program]:
  build = functools.partial(program.of_view, config, user_optimizer=full_program.user_optimizer)
  compile_step = functools.partial(_compile_step, config, cluster, bool(data.evaluations))
  programs = ProgramCache(build, compile_step, events, log, stack.enter_context(CompileCounter()))
  programs.topologies[cluster.view(cluster.slices).slices] = CachedProgram(full_program)
  return programs


def _compile_step(config: Config, cluster: Cluster, evaluates: bool, prog: Program) -> Any:
  """The compiled step of `prog`, or its halves. Compiles the checksums of the state's arrays as well, where needed."""
  if config.checkpoint.enable_checkpointing or config.elastic.elastic_enabled:
    fingerprint.prepare(prog.state)
  if not cluster.coordination.has_peers:
    return prog.compile()
  elastic = config.elastic
  return prog.compile_halves(
    evaluates=evaluates, adds=elastic.shares_per_slice > 1, witnesses=elastic.witness_period > 0
  )
