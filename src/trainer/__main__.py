"""The command `python -m trainer`: argv -> configuration -> cluster -> elastic_retry(train) -> exit code."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import trainer
from trainer.process.signals import INTERRUPTED, PREEMPTED, Signals

if TYPE_CHECKING:
  from collections.abc import Callable

  from trainer.cluster import Cluster
  from trainer.config import Config
  from trainer.run.session import Additions, Session

# Exit codes that a scheduler reads (README.md). PREEMPTED and INTERRUPTED are defined with the signals, 134
# for a hung process with the watchdog.
COMPLETE, FAILED, BAD_INPUT = 0, 1, 2


def main(argv: list[str] | None = None, signals: Signals | None = None) -> int:
  """Runs the command and returns its exit code. Imports slow modules late, so that a signal finds its handler.

  argv: default: the arguments of the process. signals: the handlers of the process, which listen already; None: the
  process keeps the handlers that it has.
  """
  from trainer.config import ConfigError, cli, validate
  from trainer.config.load import load_with_origins
  from trainer.observe import log, screen

  started = time.monotonic()
  arguments = sys.argv[1:] if argv is None else argv
  screen.protect()
  if not arguments:
    print(cli.USAGE, file=sys.stderr)
    return BAD_INPUT
  if {"--help", "-h"} & set(arguments):
    log.to_stdout(cli.help_text())
    return COMPLETE
  if "--version" in arguments:
    log.to_stdout(f"trainer {trainer.__version__}")
    return COMPLETE
  try:
    config, origins = load_with_origins(
      [argument for argument in arguments if argument != "--print-config"], repeats=False
    )
    validate.check_switch(config, origins)
    if "--print-config" in arguments:
      log.to_stdout(cli.print_config(config, origins).removesuffix("\n"))
      return COMPLETE
    return run(config, origins, signals or Signals(), started).code
  except ConfigError as error:
    print(f"error: {error}", file=sys.stderr)
    return BAD_INPUT
  except KeyboardInterrupt:  # before there is a log, or once it is closed
    print("Interrupted.", file=sys.stderr)
    return INTERRUPTED


class Ended(NamedTuple):
  """How a run ended: the exit code of the command, and the error behind it."""

  code: int
  error: BaseException | None = None


def run(
  config: Config, origins: dict[str, str], signals: Signals, started: float, additions: Additions | None = None
) -> Ended:
  """Runs a valid configuration. Prints errors, unless a program with `additions` gets them. Imports jax only here."""
  tell: Callable[[str], None] = (lambda text: None) if additions else (lambda text: print(text, file=sys.stderr))
  # Imports and tracing make millions of objects that stay. Collecting garbage among them repeatedly would take a tenth
  # of the time until the first step. `Session.ready`, or a second attempt, turns the collector on again.
  gc.disable()
  with contextlib.ExitStack() as stack:
    stack.callback(gc.enable)
    from trainer import cluster as cluster_lib

    cluster_lib.check_environment()
    from input_pipeline.workers import WorkerLost
    from pathways_standin.process import StandinLost
    from trainer.config import ConfigError
    from trainer.elastic import retry
    from trainer.process import compilation_cache, open_files
    from trainer.program import program
    from trainer.run import run_data
    from trainer.run import session as session_lib
    from worlds.peers import RunEnded

    open_files.raise_limit()
    stack.callback(compilation_cache.enable(config.run.jax_cache_dir))
    is_reported: Callable[[], bool] = lambda: False
    try:
      own = additions or session_lib.NO_ADDITIONS
      if own.source is None:
        run_data.check(config)
      config, cluster = _start_cluster(config)
      stack.callback(cluster.stop)
      is_reported = cluster.coordination.is_reported
      retry.check(cluster, config.elastic, config.run.steps)
      program.check_compiler_flags(config, cluster.view(cluster.slices).devices)
      config, note = _with_remat_policy(config, origins, cluster, own)
      session = stack.enter_context(session_lib.open_session(config, cluster, signals, started, origins, own))
    except ConfigError as error:  # a configuration that does not fit the machine or the data; nothing is written yet
      if not is_reported():
        tell(f"error: {error}")
      return Ended(BAD_INPUT, error)
    except RunEnded as ended:  # while this process started, or the supervisor does not let it join
      tell(str(ended) or f"The run has ended with exit code {ended.code}.")
      return Ended(ended.code, ended)
    except (WorkerLost, StandinLost) as error:
      tell(f"error: {error} Start again, with more memory if it is killed again.")
      return Ended(FAILED, error)
    except OSError as error:  # a folder of the run or of the data cannot be opened, although it passed the checks
      tell(f"error: cannot start the run: {error}\nFix this, or choose another folder.")
      return Ended(BAD_INPUT, error)
    if note:
      session.log.line(note)
    result = _train(config, session, cluster, session.log.record if additions else session.log.error)
    signals.ending(result.code)
    session.finish(config, result.code, is_command=additions is None)
    if result.code in (COMPLETE, PREEMPTED):  # any other end may be the fault of this process: the others go on
      cluster.coordination.finished(result.code)
  return result


def _start_cluster(config: Config) -> tuple[Config, Cluster]:
  """The configuration, with the number of shares of this run if its slices are JAX worlds, and the cluster."""
  from trainer import cluster as cluster_lib
  from trainer.cluster.launched import run_rules
  from trainer.config import rules as config_rules
  from trainer.config import shares
  from trainer.config.errors import require

  rules = None
  if cluster_lib.has_worlds(config.cluster):
    require(config_rules.of_one_process(config.elastic))  # torchrun has cluster=auto
    config = shares.resolve(config)
    rules = run_rules(config)
  return config, cluster_lib.start(config.cluster, rules, config.elastic)


def _with_remat_policy(
  config: Config, origins: dict[str, str], cluster: Cluster, additions: Additions
) -> tuple[Config, str]:
  """The configuration with a policy in the place of remat_policy=auto, and a line for the log."""
  from trainer.config import ConfigError
  from trainer.config.schema import RematPolicy
  from worlds import lines

  if config.model.remat_policy is not RematPolicy.AUTO:
    return config, ""
  if additions.own.optimizer is not None:
    raise ConfigError(
      "remat_policy=auto: counts the memory of the optimizer opt_type, and the program gives another one.\n"
      f"Choose a policy, such as remat_policy={RematPolicy.FULL}."
    )
  from trainer.preflight import remat_choice  # reads compiled programs, so only if it is needed

  origins["remat_policy"] = "chosen for these devices, because of remat_policy=auto"
  return remat_choice.resolve(config, cluster, lines.tell)


def _train(config: Config, session: Session, cluster: Cluster, tell: Callable[[str], None]) -> Ended:
  """Runs attempts until the run is complete, must stop or fails. tell: gets what ended the run."""
  import functools

  from trainer import train
  from trainer.checkpoint.errors import CheckpointError, ConfigMismatch
  from trainer.config import ConfigError
  from trainer.elastic import retry
  from trainer.elastic.attempt import Job
  from trainer.process import runtime_errors
  from trainer.run.step_records import TrainingDiverged
  from worlds.membership.client import SupervisorLost
  from worlds.peers import RunEnded

  job = Job(config.run.steps, session.units_per_slice, session.data.tokens_per_step, session.state_bytes)
  attempt = functools.partial(train.run, config, session)
  noticed = lambda: session.preemption.noticed
  try:
    outcome = retry.elastic_retry(attempt, session, config.elastic, job=job, stop=noticed)
    done = outcome.kind == "complete" and session.exports.finish(outcome.step, cluster.world, noticed)
    return Ended(COMPLETE if done else PREEMPTED)
  except SupervisorLost:  # before this process had a state
    tell("error: the supervisor is lost; this process has nothing to save.")
    return Ended(PREEMPTED)
  except RunEnded as ended:  # by the supervisor, while this process waited for the others
    if str(ended):
      tell(f"error: {ended}")
    return Ended(ended.code, ended)
  except (ConfigError, ConfigMismatch) as error:
    if not cluster.coordination.is_reported():
      tell(f"error: {error}")
    return Ended(BAD_INPUT, error)
  except TrainingDiverged as error:  # on every slice alike: one traceback is enough
    tell(traceback.format_exc() if cluster.coordination.is_primary else f"error: {error}")
    cluster.coordination.finished(FAILED)
    return Ended(FAILED, error)
  except Exception as error:  # noqa: BLE001 -- the one place where an error becomes an exit code
    tell(traceback.format_exc())
    if isinstance(error, CheckpointError):  # the other slices have the same storage, and would lose their state there
      cluster.coordination.finished(FAILED)
    if advice := runtime_errors.advice(error):
      tell(f"error: {advice}")
    return Ended(FAILED, error)
  except KeyboardInterrupt as error:
    again = "goes on from the last checkpoint" if config.checkpoint.enable_checkpointing else "starts from step 0"
    session.log.line(f"Interrupted: the same command {again}.")
    return Ended(INTERRUPTED, error)


def _runtime_is_busy() -> bool:
  """Whether a thread waits in the runtime, perhaps for a slice that hangs, or compiles (elastic/hang.py,
  cluster/health.py, checkpoint/snapshot.py and elastic/program_cache.py start such threads). The interpreter's end
  would abort the process, or wait for XLA."""
  names = ("wait for ", "health-", "snapshot-", "compile next topologies")
  return any(thread.name.startswith(names) for thread in threading.enumerate())


def command() -> NoReturn:
  """Runs the command and ends the process, even if background threads still compute."""
  signals = Signals()
  signals.listen()
  code = main(signals=signals)
  signals.ignore()
  writers = sys.modules.get("trainer.observe.writers.background")
  # wandb would wait at the interpreter's end for a server that does not answer.
  writing = writers is not None and writers.any_waits()
  if code == INTERRUPTED or writing or _runtime_is_busy():
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
  sys.exit(code)


if __name__ == "__main__":
  command()
