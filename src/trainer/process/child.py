"""Runs other commands, and ends them with all processes that they have started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import BinaryIO

_PR_SET_CHILD_SUBREAPER = 36  # of prctl(2)
_POLL_SECONDS = 0.01


def descendants(pid: int) -> list[int]:
  """The processes that a process has started, the oldest first, and then theirs. [] where the system is not Linux."""
  children: list[int] = []
  for file in Path(f"/proc/{pid}/task").glob("*/children"):
    with contextlib.suppress(OSError):  # the thread has ended
      children += map(int, file.read_text().split())
  return [*children, *(one for child in children for one in descendants(child))]


def adopt_orphans() -> None:
  """From now on, a process whose parent ends becomes a child of this process, if it descends from it. On Linux."""
  if sys.platform == "linux":
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_descendants(seconds: float) -> bool:
  """Sends SIGKILL to all processes that this process has started, and theirs, until none is left, or for so long.
  Returns whether none is left. After `adopt_orphans`, none escapes."""
  deadline = time.monotonic() + seconds
  while found := descendants(os.getpid()):
    for pid in found:
      with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
      while os.waitpid(-1, os.WNOHANG)[0]:
        pass
    if time.monotonic() > deadline:
      return False
    time.sleep(_POLL_SECONDS)
  return True


def run_child(command: Sequence[str], output: BinaryIO | None = None) -> int:
  """Returns the exit code of a command. A signal that ends this process ends the command first, with all processes that
  it has started. output: for its stdout and stderr; None: as of this process."""

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
