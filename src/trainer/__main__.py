"""The command `python -m trainer`: argv -> configuration -> `app.run` -> exit code."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import NoReturn

import trainer
from trainer import app, commands, defaults
from trainer.process.stop import Stop
from worlds.exit_codes import BAD_INPUT, COMPLETE, INTERRUPTED


def main(argv: list[str] | None = None, stop: Stop | None = None) -> int:
  """Runs the command and returns its exit code. Imports slow modules late, so that a signal finds its handler.

  argv: default: the arguments of the process. stop: the handlers of the process, which listen already; None: the
  process keeps the handlers that it has.
  """
  from input_pipeline.storage import StorageError
  from trainer.config import cli, validate
  from trainer.config.errors import ConfigError
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
    return app.run(config, defaults.extensions, stop or Stop(), started, origins).code
  except (ConfigError, StorageError, KeyboardInterrupt) as error:  # before there is a log, or once it is closed
    return commands.print_error(error)


def _runtime_is_busy() -> bool:
  """Whether a thread waits in the runtime, perhaps for a slice that hangs, or compiles (elastic/wait.py,
  cluster/health.py, checkpoint/snapshot.py and elastic/program_cache.py start such threads). The interpreter's end
  would abort the process, or wait for XLA."""
  names = ("wait for ", "health-", "snapshot-", "compile next topologies")
  return any(thread.name.startswith(names) for thread in threading.enumerate())


def command() -> NoReturn:
  """Runs the command and ends the process, even if background threads still compute."""
  stop = Stop()
  stop.listen()
  code = main(stop=stop)
  stop.ignore()
  writers = sys.modules.get("trainer.services.background_writer")
  # wandb would wait at the interpreter's end for a server that does not answer.
  writing = writers is not None and writers.has_pending()
  if code == INTERRUPTED or writing or _runtime_is_busy():
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
  sys.exit(code)


if __name__ == "__main__":
  command()
