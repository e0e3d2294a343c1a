"""Runs another command, and ends it with this process."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from types import FrameType
from typing import BinaryIO


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
