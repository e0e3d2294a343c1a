"""The run's plain-text log: every line on stdout and in {run}/log.txt, word for word the same, after its time."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from trainer.observe import files
from worlds.lines import timed, warn

LOG_FILE = "log.txt"


class Log:
  """Prints and records lines; made once per process by `get` and passed to the components that log.

  Scripts read the lines (`completed step: 8, ...`), so only the time precedes them. Each line is flushed. Only the
  primary process prints.
  """

  def __init__(self, lines: files.LineFile, *, quiet: bool = False) -> None:
    self._lines = lines
    self._quiet = quiet
    self._lock = threading.Lock()
    self._print: Callable[[str], None] = to_stdout
    self._details = True
    self.operation = ""  # "printing" while a print is under way, which a terminal that is stopped (Ctrl-S) holds up

  def line(self, text: str) -> None:
    """Prints and records one line, or a block of lines."""
    self._add(text, show=True)

  def detail(self, text: str) -> None:
    """Like `line`, for the line of a step: not printed while a progress bar shows the same numbers."""
    self._add(text, show=self._details)

  def _add(self, text: str, show: bool) -> None:
    if self._quiet:
      return
    with self._lock:
      text = timed(text)
      self._lines.append(text)
      if show:
        self.operation = "printing"
        self._print(text)
        self.operation = ""

  def record(self, text: str) -> None:
    """Records text in the file only. Takes no lock, so that a watchdog can use it while a print hangs."""
    if not self._quiet:
      self._lines.append(timed(text))

  def warning(self, text: str) -> None:
    """Prints and records a line that starts with `warning: `; processes that are not primary print it on stderr."""
    if self._quiet:
      warn(text)
    else:
      self.line(f"warning: {text}")

  def error(self, text: str) -> None:
    """Records what ended the run, and prints it on stderr, in every process."""
    self.record(text)
    print(timed(text), file=sys.stderr, flush=True)

  def redirect(self, printer: Callable[[str], None] | None, *, details: bool = True) -> None:
    """Prints through `printer` from now on, without the lines of `detail` if details=False; None: to stdout."""
    with self._lock:
      self._print, self._details = printer or to_stdout, details

  def take_over(self, run_directory: str) -> None:
    """This process is the primary from now on: it continues the log of the primary that is lost or has left."""
    with self._lock:
      self._lines, self._quiet = files.open_lines(run_directory, LOG_FILE), False

  def hand_over(self) -> None:
    with self._lock:
      self._lines.close()
      self._quiet = True

  def flush(self) -> None:
    self._lines.flush()

  def close(self) -> None:
    self._lines.close()


def get(run_directory: str | None, *, is_primary: bool = True) -> Log:
  """The log of a run directory (local or gs://; None: stdout only). Continues an existing log.txt.

  In a process that is not primary, `line`, `detail` and `record` do nothing, and warnings and errors go to stderr.
  """
  return Log(files.open_lines(run_directory if is_primary else None, LOG_FILE), quiet=not is_primary)


def to_stdout(text: str) -> None:
  """Prints one or more lines. Never raises after `screen.protect`."""
  print(text, flush=True)
