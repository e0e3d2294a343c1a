"""Exit codes of tools that import JAX."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from types import FrameType
from typing import BinaryIO

from input_pipeline.storage import StorageError
from trainer import cluster
from trainer.checkpoint.errors import CheckpointError
from trainer.config.errors import ConfigError, tell_end


def exit_code(work: Callable[[], int | None], *expected: type[Exception]) -> int:
  """Returns what `work` returns, None as 0; or the code of `tell_end` if the environment or the input is wrong, or
  storage fails.

  work: checks its input, then calls cluster.check_environment, then imports jax. expected: further errors of `work`
  that mean wrong input.
  """
  wrong: tuple[type[Exception], ...] = (ConfigError, StorageError, CheckpointError, *expected)
  try:
    try:
      return work() or 0
    except (RuntimeError, AssertionError):
      cluster.check_devices()  # if there are none, that is the reason
      raise
  except wrong as error:
    return tell_end(error)


def run_child(command: Sequence[str], output: BinaryIO | None = None) -> int:
  """Returns the exit code of a command. A signal that ends this process ends the command first, with all processes that
  it has started. output: for its stdout and stderr; None: those of this process."""

  def end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)

  before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
  streams = None if output is None else (subprocess.DEVNULL, output, subprocess.STDOUT)
  stdin, stdout, stderr = streams or (None, None, None)
  child = None
  try:
    child = subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True)
    return child.wait()
  finally:
    if child is not None and child.poll() is None:
      os.killpg(child.pid, signal.SIGKILL)
      child.wait()
    for number, handler in before.items():
      signal.signal(number, handler)
