"""A run from a valid configuration to its end: cluster -> session -> elastic_retry(train) -> exit code.

The command, the library and Ray call `run`, each with what it adds.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import time
import traceback
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from trainer.process.stop import Stop
from worlds.exit_codes import BAD_INPUT, COMPLETE, FAILED, INTERRUPTED, PREEMPTED

if TYPE_CHECKING:
  from collections.abc import Callable, Mapping

  from trainer.cluster import Cluster
  from trainer.config import Config
  from trainer.run.plugins import Extensions
  from trainer.run.session import Session

_SECONDS_TO_BE_ENDED = 2.0  # by the supervisor, if another process of this slice has ended


class Ended(NamedTuple):
  """How a run ended: the exit code of the command, and the error behind it."""

  code: int
  error: BaseException | None = None


def run(
  config: Config,
  extensions: Callable[[], Extensions],
  stop: Stop,
  started: float,
  origins: Mapping[str, str] = MappingProxyType({}),
  is_command: bool = True,
) -> Ended:
  """Runs a valid configuration. Prints errors, and for a command what to do next; the library gets errors in
  Ended.error. Imports jax only here.

  extensions: returns what is added to the core. started: time.monotonic() when the command began. origins: where each
  key was given.
  """
  tell: Callable[[str], None] = (lambda text: print(text, file=sys.stderr)) if is_command else (lambda text: None)
  # Imports and tracing make millions of objects that stay. Collecting garbage among them repeatedly would take a tenth
  # of the time until the first step. `Session.ready`, or a second attempt, turns the collector on again.
  gc.disable()
  with contextlib.ExitStack() as stack:
    stack.callback(gc.enable)
    from trainer import cluster as cluster_lib

    cluster_lib.check_environment()
    from input_pipeline.workers import WorkerLost
    from pathways_standin.process import StandinLost
    from trainer.checkpoint.checkpoint_errors import CheckpointError
    from trainer.config import ConfigError
    from trainer.process import compilation_cache, file_limit
    from trainer.run import run_data
    from trainer.run.preparation import prepare
    from trainer.run.session import open_session
    from worlds.peers import RunEnded

    file_limit.raise_limit()
    stack.callback(compilation_cache.enable(config.run.jax_cache_dir))
    is_reported: Callable[[], bool] = lambda: False
    try:
      added = extensions()
      if added.source is None:
        run_data.check(config)
      config, cluster = _start_cluster(config)
      stack.callback(cluster.stop)
      is_reported = cluster.is_reported
      prepared = stack.enter_context(prepare(config, cluster, added, origins))
      session = stack.enter_context(open_session(prepared, stop, started))
    except (ConfigError, CheckpointError, RunEnded, WorkerLost, StandinLost, OSError) as error:
      return _not_opened(error, is_reported, tell)
    result = _train(session, session.log.error if is_command else session.log.record)
    stop.ending(result.code)
    session.finish(result.code, is_command=is_command)
    if result.code in (COMPLETE, PREEMPTED):  # any other end may be the fault of this process: the others go on
      cluster.finished(result.code)
  return result


def _not_opened(error: Exception, is_reported: Callable[[], bool], tell: Callable[[str], None]) -> Ended:
  """The end of a process whose run was never open."""
  from input_pipeline import storage
  from trainer.checkpoint.checkpoint_errors import CheckpointError
  from trainer.config import ConfigError
  from worlds.peers import RunEnded

  if isinstance(error, ConfigError):  # it does not fit the machine or the data; nothing is written yet
    if not is_reported():
      tell(f"error: {error}")
    return Ended(BAD_INPUT, error)
  if isinstance(error, RunEnded):  # while this process started, or the supervisor does not let it join
    tell(str(error) or f"The run has ended with exit code {error.code}.")
    return Ended(error.code, error)
  if isinstance(error, OSError | CheckpointError):  # a folder cannot be opened, although it passed the checks
    failed = storage.failure(error)
    remedy = "Fix this, or choose another folder." if failed is None else failed.remedy
    tell(f"error: cannot start the run: {error}\n{remedy}")
    return Ended(FAILED if failed is not None and failed.passes else BAD_INPUT, error)
  tell(f"error: {error} Start again, with more memory if it is killed again.")  # a process that helps this one
  return Ended(FAILED, error)


def _start_cluster(config: Config) -> tuple[Config, Cluster]:
  """The configuration, with the number of shares of this run if its slices are JAX worlds, and the cluster."""
  from trainer import cluster as cluster_lib
  from trainer.cluster.launched import run_rules
  from trainer.config import rules as config_rules
  from trainer.config import shares
  from trainer.config.errors import require

  rules = None
  if cluster_lib.has_worlds(config.cluster):
    require(config_rules.multiprocess_conflicts(config.elastic))  # torchrun has cluster=auto
    config = shares.resolve(config)
    rules = run_rules(config)
  else:
    require(config_rules.needs_processes(config.optimizer))
  return config, cluster_lib.start(config.cluster, rules, config.elastic)


def _train(session: Session, tell: Callable[[str], None]) -> Ended:
  """Runs attempts until the run is complete, must stop or fails. tell: gets what ended the run."""
  import functools

  from input_pipeline import storage
  from trainer import train
  from trainer.checkpoint.checkpoint_errors import CheckpointError, ConfigMismatch
  from trainer.config import ConfigError
  from trainer.elastic import retry
  from trainer.process import runtime_errors
  from trainer.run.step_records import TrainingDiverged
  from worlds.membership.client import SupervisorLost
  from worlds.peers import RunEnded

  cluster, attempt = session.cluster, functools.partial(train.run, session)
  try:
    outcome = retry.elastic_retry(attempt, session.elastic, stop=lambda: session.stop.noticed)
    return Ended(COMPLETE if outcome.kind == "complete" else PREEMPTED)
  except SupervisorLost:  # before this process had a state
    tell("error: the supervisor is lost; this process has nothing to save.")
    return Ended(PREEMPTED)
  except RunEnded as ended:  # by the supervisor, while this process waited for the others
    if str(ended):
      tell(f"error: {ended}")
    return Ended(ended.code, ended)
  except (ConfigError, ConfigMismatch) as error:
    if not cluster.is_reported():
      tell(f"error: {error}")
    return Ended(BAD_INPUT, error)
  except TrainingDiverged as error:  # on every slice alike: one traceback is enough
    tell(traceback.format_exc() if cluster.is_primary else f"error: {error}")
    cluster.finished(FAILED)
    return Ended(FAILED, error)
  except Exception as error:  # noqa: BLE001 -- the one place where an error becomes an exit code
    # Storage has failed, which its message says: a traceback would only hide it.
    told = isinstance(error, CheckpointError) or (isinstance(error, OSError) and storage.failure(error) is not None)
    if cluster.world.size > 1 and not told:
      # If another process of this slice has ended, a collective fails here, and the supervisor is about to end this
      # process too: its traceback would hide the reason.
      time.sleep(_SECONDS_TO_BE_ENDED)
    tell(f"error: {error}" if told else traceback.format_exc())
    if isinstance(error, CheckpointError):  # the other slices have the same storage, and would lose their state there
      cluster.finished(FAILED)
    if advice := runtime_errors.advice(error):
      tell(f"error: {advice}")
    return Ended(FAILED, error)
  except KeyboardInterrupt as error:
    again = (
      "goes on from the last checkpoint" if session.config.checkpoint.enable_checkpointing else "starts from step 0"
    )
    session.log.line(f"Interrupted: the same command {again}.")
    return Ended(INTERRUPTED, error)
