"""What all commands share: how they read their arguments, and the exit codes of their errors."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from typing import NoReturn

from input_pipeline.input_errors import (
  ConfigError,  # trainer.config imports pydantic, and a signal would find no handler
)
from worlds.exit_codes import BAD_INPUT, COMPLETE, FAILED, INTERRUPTED


class _Parser(argparse.ArgumentParser):
  def error(self, message: str) -> NoReturn:
    raise ConfigError(f"{message}.\n--help describes every option.")


def parser(doc: str) -> argparse.ArgumentParser:
  """The parser of a command whose module has this docstring."""
  name = re.search(r"python -m [\w.]+", doc)
  assert name is not None, doc
  formatter = argparse.RawDescriptionHelpFormatter
  return _Parser(prog=name[0], description=doc, formatter_class=formatter, allow_abbrev=False)


def main(
  parser: argparse.ArgumentParser,
  body: Callable[[argparse.Namespace], int | None],
  argv: list[str] | None = None,
  *,
  rest: str = "",
) -> int:
  """Calls `body` with the options in `argv`. Returns the exit code that it returns, None as 0, or the code of its
  error, which is printed:

  | error | exit code |
  |---|---|
  | of storage or of the system, where the same command may succeed later; a lost process | 1 |
  | any other error of storage or of the system; of the configuration, a checkpoint or a text | 2 |
  | Ctrl-C | 130 |

  Other errors are raised. argv: None: the arguments of the process. rest: the option that gets the arguments that the
  parser does not have; "": there must be none. A body checks its input before it imports jax.
  """
  from input_pipeline.workers import WorkerLost
  from trainer.checkpoint.checkpoint_errors import CheckpointError, Rejected

  try:
    if rest:
      options, others = parser.parse_known_args(argv)
      setattr(options, rest, others)
    else:
      options = parser.parse_intermixed_args(argv)
    try:
      return body(options) or COMPLETE
    except (RuntimeError, AssertionError):
      if "jax" in sys.modules:
        from trainer import cluster

        cluster.check_devices()  # if there are none, that is the reason
      raise
  except (ConfigError, CheckpointError, Rejected, WorkerLost, OSError, UnicodeDecodeError, KeyboardInterrupt) as error:
    return print_error(error)


def print_error(error: BaseException) -> int:
  """Prints an error that ends a command, and returns the exit code of the table of `main`."""
  from input_pipeline import storage
  from input_pipeline.workers import WorkerLost

  if isinstance(error, KeyboardInterrupt):
    print("Interrupted.", file=sys.stderr)
    return INTERRUPTED
  failed = storage.failure(error)
  text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
  print(f"error: {text}", *([failed.remedy] if failed is not None else []), sep="\n", file=sys.stderr)
  if failed is not None:
    return FAILED if failed.passes else BAD_INPUT
  return FAILED if isinstance(error, WorkerLost) or storage.may_pass(error) else BAD_INPUT
