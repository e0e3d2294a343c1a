"""Lines that a process prints: each begins with its time."""

from __future__ import annotations

import sys
import textwrap
import threading
import time
from collections.abc import Callable

_MOST_LINES, _PERIOD_SECONDS = 10, 60.0  # of a Sparse log
_SLOW_SECONDS = 5.0  # a wait as short as this is normal


def timed(text: str) -> str:
  """Returns `text` with date and time (UTC) in front of each line that is not blank."""
  return textwrap.indent(text, time.strftime("%Y-%m-%d %H:%M:%S ", time.gmtime()))


def tell(text: str) -> None:
  """Prints lines on stdout, with their time."""
  print(timed(text), flush=True)


def warn(text: str) -> None:
  """Prints a warning on stderr, with its time."""
  print(timed(f"warning: {text}"), file=sys.stderr, flush=True)


class Patience:
  """Lines about a wait: the first after some seconds, then one a minute."""

  def __init__(self, log: Callable[[str], None] = tell) -> None:
    self._log, self._began, self._silent = log, time.monotonic(), _SLOW_SECONDS

  @property
  def seconds(self) -> float:
    """How long the wait has lasted."""
    return time.monotonic() - self._began

  def waits(self, line: Callable[[], str]) -> None:
    """Call it again and again during the wait. line: says what is waited for."""
    if (seconds := self.seconds) >= self._silent:
      self._log(f"{line()} ({seconds:.0f} s so far).")
      self._silent = self.seconds + _PERIOD_SECONDS


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
