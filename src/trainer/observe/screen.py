"""Streams for stdout and stderr that never raise: a lost terminal or a full disk must not end what a process does."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn


class _Stream(io.TextIOWrapper):
  """Text on a file descriptor. Its first error (a closed pipe, a full disk, a lost terminal) points it to /dev/null."""

  def __init__(self, file: io.BufferedWriter[io.FileIO], encoding: str, *, ends: bool) -> None:
    """ends: whether this error ends the process, as it ends other commands."""
    super().__init__(file, encoding, "backslashreplace", line_buffering=True)
    self._ends = ends

  def write(self, text: str) -> int:
    try:
      return super().write(text)
    except OSError as error:
      self._lose(error)
      return len(text)

  def flush(self) -> None:
    try:
      super().flush()
    except OSError as error:
      self._lose(error)

  def _lose(self, error: OSError) -> None:
    if isinstance(error, BlockingIOError):  # the reader of a non-blocking pipe is slow: what fits is written later
      return
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, self.fileno())  # also for text that is still in the buffer, for libraries, and for child processes
    os.close(null)
    if self._ends:  # as a shell shows a command that SIGPIPE has killed; or with a message and 1
      raise SystemExit(128 + signal.SIGPIPE if isinstance(error, BrokenPipeError) else f"error: stdout: {error}")
    if self is sys.stdout and not isinstance(error, BrokenPipeError):  # `| head` closes the pipe on purpose
      print(f"warning: stdout is lost: {error}. This process prints nothing there any more.", file=sys.stderr)


def protect(*, ends: bool = False) -> None:
  """Makes every print of this process safe, also in libraries: after an error of stdout or stderr, nothing is
  printed there any more, and the process goes on. Also opens them if they are closed (`>&-`), and escapes characters
  that their encoding lacks. ends: an error of stdout ends the process."""
  for name in ("stdout", "stderr"):
    stream = getattr(sys, name)
    if stream is None:
      setattr(sys, name, open(os.devnull, "w", errors="backslashreplace"))  # noqa: SIM115 - open until the end
    elif type(stream) is io.TextIOWrapper:  # neither protected already nor replaced by a test
      with contextlib.suppress(OSError):
        stream.flush()
      try:
        file = io.BufferedWriter(io.FileIO(stream.fileno(), "w", closefd=False))
      except io.UnsupportedOperation:  # in memory
        stream.reconfigure(errors="backslashreplace")
        continue
      setattr(sys, name, _Stream(file, stream.encoding, ends=ends and name == "stdout"))


def command(main: Callable[[], int | None]) -> NoReturn:
  """Runs `main`, all of a command that prints its result, and ends the process with its exit code. If the reader of
  stdout has gone (`| head`), the process ends at once and without a message."""
  protect(ends=True)
  code = main()
  sys.stdout.flush()
  sys.exit(code)
