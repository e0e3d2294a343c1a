"""What belongs to the process rather than to one set of living slices: records, data, programs, watchdog."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import time
from collections.abc import Iterator
from typing import Any

from trainer.checkpoint import run_folder
from trainer.checkpoint.arrays import fingerprint, state_tree
from trainer.checkpoint.checkpoint_errors import CheckpointError
from trainer.checkpoint.snapshot import Snapshots
from trainer.checkpoint.step_folders import StepFolders
from trainer.config import cli
from trainer.config.config_files import CONFIG_FILE
from trainer.elastic.elastic_run import ElasticRun
from trainer.elastic.program_cache import CachedProgram, ProgramCache
from trainer.observe import environment, files
from trainer.observe import log as log_lib
from trainer.observe.compiles import CompileCounter
from trainer.observe.events import EventLog
from trainer.observe.log import Log
from trainer.observe.metrics import Metrics
from trainer.observe.progress_bar import Progress
from trainer.observe.watchdog import Watchdog
from trainer.process.stop import Stop
from trainer.program import program
from trainer.program.program import Program
from trainer.run.announce import announce, next_commands
from trainer.run.plugins import Opened
from trainer.run.preparation import Prepared
from trainer.world import SINGLE_WORLD


class Session:
  """A run in this process: its configuration, its slices, its open records and data. Outlives the attempts."""

  def __init__(self, prepared: Prepared, stop: Stop, started: float, stack: contextlib.ExitStack) -> None:
    """Opens the run's folder. `stack` closes what is open. started: time.monotonic() when the process began. Raises
    ConfigError if the run cannot have the folder."""
    config, cluster = prepared.config, prepared.cluster
    self.config, self.cluster, self.stop, self.started = config, cluster, stop, started
    self.attempts, self.was_ready, self.wrote_config = 0, False, False
    self.data, self.plugins, self.weights = prepared.data, prepared.plugins, prepared.weights
    self._open_records(stack)
    self.metrics.callbacks.extend(prepared.callbacks)
    full = prepared.program
    build = functools.partial(program.of_view, config, user_optimizer=full.user_optimizer)
    counter = stack.enter_context(CompileCounter())
    self.programs = ProgramCache(build, self._compile_step, self.events, self.log, counter)
    self.programs.topologies[cluster.view(cluster.slices).slices] = CachedProgram(full)
    self.elastic = ElasticRun(
      config.elastic,
      cluster,
      self.log,
      self.events,
      self.programs,
      prepared.faults,
      steps=config.run.steps,
      units=full.plan.units,
      tokens_per_step=self.data.tokens_per_step,
      state_bytes=state_tree.state_bytes(full.state),
    )
    for line in prepared.notes:
      self.log.line(line)
    cluster.on_role(self.change_role)

  def _open_records(self, stack: contextlib.ExitStack) -> None:
    """Opens the run's folder and what is written there, and begins to listen to requests."""
    config, cluster = self.config, self.cluster
    writes, directory = cluster.is_primary, config.run_directory
    log = self.log = log_lib.get(directory, is_primary=writes)
    stack.callback(log.close)
    self.folder = stack.enter_context(run_folder.opened(config, cluster, log.line))
    events = self.events = EventLog(directory, config.run.run_name, is_primary=writes)
    stack.callback(events.close)
    self.plugins.open(
      Opened(config, cluster, self.data, log, events, self.folder.run_id, lambda: self.metrics.earlier_step), stack
    )
    self.metrics = Metrics(
      directory,
      events,
      is_primary=writes,
      recorders=self.plugins.recorders,
      in_thread=not cluster.recovers_in_process,  # one controller writes a record while the devices compute
      at_once=config.optimizer.local_steps,
    )
    stack.callback(self.metrics.close)
    self.progress = Progress(
      log,
      total_steps=config.run.steps,
      total_slices=cluster.num_slices,
      log_period=config.observe.log_period,
      eval_interval=config.observe.eval_interval,
      terminal=None if writes else False,
    )
    recovers = config.elastic.elastic_enabled and cluster.recovers_in_process
    self.watchdog = Watchdog(config.observe.watchdog_timeout_seconds, log, events, recovers=recovers)
    stack.callback(self.watchdog.stop)
    self.snapshots = stack.enter_context(contextlib.closing(Snapshots(cluster.world, log.line, events.emit)))
    self._watch_requests()

  def begin(self) -> None:
    """An attempt begins. The first attempt began with the process."""
    self.attempts += 1
    if self.attempts > 1:
      self.started = time.monotonic()
      gc.enable()  # still off if the first attempt was never ready; a lost attempt's objects must be collected

  def ready(self, step: int) -> None:
    """The next step can be dispatched: records how long that took. Writes {run}/config.yml, only now, because before,
    the checkpoint could have refused it."""
    now = time.monotonic()
    if self.cluster.is_primary and not self.was_ready:
      self._write_config()
      self.plugins.ready()
    self.was_ready = True
    self.events.emit("init_done", step=step, seconds=now - self.started)
    self.watchdog.step_done(step)
    self.stop.running()
    if not gc.isenabled():
      # Off since the process began (see __main__). The objects of imports and tracing stay, so collections in the loop
      # need not visit them. What a program that uses the library has frozen cannot be told apart from them later.
      if not gc.get_freeze_count():
        gc.freeze()
      gc.enable()

  def _write_config(self) -> None:
    """Writes {run}/config.yml; `finish` tries again if storage fails: what trains is in memory."""
    try:
      files.write_text(self.config.run_directory, CONFIG_FILE, cli.print_config(self.config))
      self.wrote_config = True
    except OSError as error:
      self.log.warning(f"{error}. Training goes on, and the end of the run tries again")

  def change_role(self, is_primary: bool) -> None:
    """This process now is the primary, or no longer is: begins or ends the writing of the run's files. A new primary
    also records the steps that the primary before it has not recorded."""
    if not is_primary:
      for record in (self.metrics, self.events, self.log):
        record.hand_over()
      return
    try:
      self.folder.require(f"the records after step {self.metrics.last_step} could not be taken over")
    except OSError as error:  # storage fails now: the records wait in memory
      print(f"warning: {error}", file=sys.stderr)
    waited = self.metrics.seconds_since_last_record
    self.log.take_over(self.config.run_directory)
    self.events.take_over(self.config.run_directory)
    for missing in self.metrics.take_over():
      self.progress.step(missing)
    self.events.emit("primary", step=self.metrics.last_step, host=environment.host(), seconds=waited)

  def finish(self, code: int, *, is_command: bool = False) -> None:
    """Records the end of the process with its exit code; for a complete run also what plug-ins add, and, unless a
    program has started it (is_command), what to do with the run next."""
    self.events.emit("run_end", exit=code)
    self.progress.close()
    self.metrics.close(code)
    self.events.close()
    if not self.cluster.is_primary:
      return
    try:
      self.folder.require("No report is written")
      if self.was_ready and not self.wrote_config:
        self._write_config()
      if self.config.checkpoint.enable_checkpointing:
        _name_rejected(self.config.run_directory, self.log)
    except (CheckpointError, OSError) as error:
      if code == 0:  # otherwise the reason of the end says more
        self.log.warning(str(error))
      return
    self.plugins.ends(code)
    if code == 0 and is_command:
      self.log.line("\n".join(["Next:", *next_commands(self.config, self.cluster, self.data)]))

  def _watch_requests(self) -> None:
    """What this process does is told to the other worlds, and a request to stop to all. Without other worlds and their
    supervisor, the watchdog ends this process if it hangs."""
    cluster, stop, watchdog, log, events = self.cluster, self.stop, self.watchdog, self.log, self.events
    elastic, saves = self.config.elastic, self.config.checkpoint

    def record_exit(code: int) -> None:
      events.emit("run_end", exit=code)
      events.flush()

    cluster.watch(
      busy=lambda: watchdog.operation or log.operation,
      noticed=lambda: bool(stop.request),
      unsupervised=lambda: watchdog.set_timeout(elastic.elastic_timeout_seconds, "elastic_timeout_seconds"),
    )
    stop.join_run(
      cluster.stop_agreed,
      saves=saves.enable_autocheckpoint and saves.enable_checkpointing,
      several=cluster.world.size > 1,
      log=log.line,
      emit=events.emit,
      asked=cluster.stop_asked,
      on_exit=record_exit,
    )

  def _compile_step(self, prog: Program) -> Any:
    """The compiled step of `prog`, or its halves. Compiles the checksums of the state's arrays too, where needed."""
    elastic = self.config.elastic
    if self.config.checkpoint.enable_checkpointing or elastic.elastic_enabled:
      fingerprint.prepare(prog.state)
    if self.cluster.recovers_in_process:
      return prog.compile()
    if self.config.optimizer.has_local_steps:
      replicas = self.cluster.num_slices * elastic.shares_per_slice
      return prog.compile_round(replicas, evaluates=bool(self.data.evaluations), adds=elastic.shares_per_slice > 1)
    return prog.compile_halves(
      evaluates=bool(self.data.evaluations), adds=elastic.shares_per_slice > 1, witnesses=elastic.witness_period > 0
    )


@contextlib.contextmanager
def open_session(prepared: Prepared, stop: Stop, started: float) -> Iterator[Session]:
  """Opens the run, announces it, and closes all at the end. Raises as Session."""
  with contextlib.ExitStack() as stack:
    session = Session(prepared, stop, started, stack)
    announce(prepared, session.log, session.events)
    stack.enter_context(session.progress)
    session.watchdog.start()
    yield session


def _name_rejected(run_directory: str, log: Log) -> None:
  """Logs the damaged checkpoints that the run keeps. Raises CheckpointError or OSError if they cannot be listed."""
  if found := StepFolders(f"{run_directory}/checkpoints", SINGLE_WORLD, log.line).rejected():
    names = "; ".join(f"{path} ({reason})" for path, reason in found.items())
    log.line(f"Damaged checkpoints are kept: {names}. Delete them if nobody wants to look at them.")
