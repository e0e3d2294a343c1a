"""Lines that a process prints: each begins with its time."""

from __future__ import annotations

import sys
import textwrap
import threading
import time
from collections.abc import Callable

_MOST_LINES, _PERIOD_SECONDS = 10, 60.0  # of a Sparse log


def timed(text: str) -> str:
  """Returns `text` with date and time (UTC) in front of each line that is not blank."""
  return textwrap.indent(text, time.strftime("%Y-%m-%d %H:%M:%S ", time.gmtime()))


def tell(text: str) -> None:
  """Prints lines on stdout, with their time."""
  print(timed(text), flush=True)


def warn(text: str) -> None:
  """Prints a warning on stderr, with its time."""
  print(timed(f"warning: {text}"), file=sys.stderr, flush=True)


class Sparse:
  """A log for what strangers can cause: passes on at most 10 lines a minute, and the number of those it leaves out."""

  def __init__(self, log: Callable[[str], None]) -> None:
    self._log, self._lock = log, threading.Lock()
    self._since, self._lines = time.monotonic(), 0

  def __call__(self, line: str) -> None:
    with self._lock:
      now, omitted = time.monotonic(), self._lines - _MOST_LINES
      if now - self._since > _PERIOD_SECONDS:
        self._since, self._lines = now, 0
        if omitted > 0:
          self._log(f"{omitted} more lines like the next one were left out.")
      self._lines += 1
      if self._lines == _MOST_LINES:
        line += " More lines like this one are left out for a minute."
      if self._lines <= _MOST_LINES:
        self._log(line)
