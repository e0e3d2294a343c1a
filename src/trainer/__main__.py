"""The command `python -m trainer`: argv -> configuration -> cluster -> elastic_retry(train) -> exit code."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
import traceback
from typing import NoReturn

from trainer.config import ConfigError, load
from trainer.config.schema import Config

# What a scheduler reads (docs/architecture.md). The sixth, 134 for a hung process, is the watchdog's own.
COMPLETE, FAILED, BAD_INPUT, PREEMPTED, INTERRUPTED = 0, 1, 2, 42, 130

OUT_OF_MEMORY = (
  "error: the devices have too little memory for this run. Lower per_device_batch_size (and raise "
  "gradient_accumulation_steps, for the same global batch), take remat_policy=full, or shard over more devices; "
  "python -m trainer.tools.preflight with the same arguments says what fits."
)


def main(argv: list[str] | None = None) -> int:
  """Runs the command and returns its exit code."""
  started = time.monotonic()
  arguments = sys.argv[1:] if argv is None else argv
  _make_stdout_usable()
  if not arguments or {"--help", "-h"} & set(arguments):
    from trainer.config import cli
    from trainer.observe import log

    log.to_stdout(cli.help_text())
    return COMPLETE if arguments else BAD_INPUT
  try:
    config = load([argument for argument in arguments if argument != "--print-config"])
    if "--print-config" in arguments:
      from trainer.config import cli
      from trainer.observe import log

      log.to_stdout(cli.print_config(config).removesuffix("\n"))
      return COMPLETE
    return _run(config, started)
  except ConfigError as error:
    print(f"error: {error}", file=sys.stderr)
    return BAD_INPUT
  except (KeyboardInterrupt, ImportError) as error:  # before there is a log, or once it is closed
    # A library in C++ that is interrupted while it loads makes an ImportError of that.
    if not isinstance(error.__cause__ or error, KeyboardInterrupt):
      raise
    print("Interrupted.", file=sys.stderr)
    return INTERRUPTED


def _make_stdout_usable() -> None:
  """It may be closed (`>&-`), or have an encoding that lacks a character of the configuration."""
  if sys.stdout is None:
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for as long as the process lives
  if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(errors="backslashreplace")


def _run(config: Config, started: float) -> int:
  """The run of a valid configuration. jax is imported here and not above, so that --help stays fast."""
  import functools
  import gc

  # Imports and tracing make millions of objects that stay: looking through them again and again is a tenth of the time
  # until the first step. `Session.ready`, or a second attempt, turns the collector on again.
  gc.disable()

  from trainer import cluster as cluster_lib
  from trainer import session as session_lib
  from trainer import train
  from trainer.checkpoint.errors import ConfigMismatch
  from trainer.elastic import retry
  from trainer.elastic.attempt import Job

  session_lib.enable_compilation_cache(config.run.jax_cache_dir)
  with contextlib.ExitStack() as stack:
    stack.callback(gc.enable)
    try:
      cluster = cluster_lib.start(config.cluster, config.elastic.elastic_poll_seconds)
      stack.callback(cluster.stop)
      retry.check(cluster, config.elastic, config.run.steps)
      session = stack.enter_context(session_lib.open_session(config, cluster, started))
    except ValueError as error:  # a configuration that does not fit the machine or the data; nothing is written yet
      print(f"error: {error}", file=sys.stderr)
      return BAD_INPUT
    except OSError as error:  # a folder of the run's or the data's that looked well and is not
      print(f"error: the run cannot begin: {error}\nMend that, or choose another folder.", file=sys.stderr)
      return BAD_INPUT
    job = Job(
      config.run.steps, config.optimizer.gradient_accumulation_steps, session.tokens_per_step, session.state_bytes
    )
    attempt = functools.partial(train.run, config, session)
    code = FAILED
    try:
      outcome = retry.elastic_retry(
        attempt,
        cluster,
        config.elastic,
        session.events,
        session.log,
        job=job,
        stop=lambda: session.preemption.noticed,
      )
      code = COMPLETE if outcome.kind == "complete" else PREEMPTED
    except (ConfigError, ConfigMismatch) as error:
      code = BAD_INPUT
      session.log.error(f"error: {error}")
    except Exception as error:  # noqa: BLE001 -- the one place where an error becomes an exit code
      session.log.error(traceback.format_exc())
      if "RESOURCE_EXHAUSTED" in str(error) and "out of memory" in str(error).lower():
        session.log.error(OUT_OF_MEMORY)
    except KeyboardInterrupt:
      code = INTERRUPTED
      again = "goes on from the last checkpoint" if config.checkpoint.enable_checkpointing else "starts from step 0"
      session.log.line(f"Interrupted: the same command {again}.")
    session.finish(config, code)
  return code


def command() -> NoReturn:
  """Runs the command and ends the process, even where threads still compute what nobody needs any more."""
  code = main()
  prepare = sys.modules.get("trainer.elastic.prepare")
  if code == INTERRUPTED or (prepare is not None and prepare.under_way()):
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
  sys.exit(code)


if __name__ == "__main__":
  command()
