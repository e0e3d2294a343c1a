"""The run's plain-text log: every line on stdout and in {run}/log.txt, word for word the same."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

from trainer.observe import files
from trainer.world import SINGLE_WORLD, World

LOG_FILE = "log.txt"


class Log:
  """Prints and records lines; made once per process by `get` and passed to whoever has something to say.

  Lines carry no prefix: scripts read them (`completed step: 8, ...`). Each line is flushed. Only process 0 prints.
  """

  def __init__(self, lines: files.LineFile, *, quiet: bool = False) -> None:
    self._lines = lines
    self._quiet = quiet
    self._lock = threading.Lock()
    self._print: Callable[[str], None] = to_stdout
    self._details = True

  def line(self, text: str) -> None:
    """One line (or a block of lines) for the person who watches and for the file."""
    if self._quiet:
      return
    with self._lock:
      self._lines.append(text)
      self._print(text)

  def detail(self, text: str) -> None:
    """A line of every step: like `line`, but on the screen only where no live display says the same."""
    if self._quiet:
      return
    with self._lock:
      self._lines.append(text)
      if self._details:
        self._print(text)

  def record(self, text: str) -> None:
    """Text for the file only. Takes no lock of its own, so that a watchdog can use it when the screen is stuck."""
    if not self._quiet:
      self._lines.append(text)

  def warning(self, text: str) -> None:
    """A line that starts with `warning: `; also printed, on stderr, by processes that are otherwise silent."""
    if self._quiet:
      print(f"warning: {text}", file=sys.stderr, flush=True)
    else:
      self.line(f"warning: {text}")

  def error(self, text: str) -> None:
    """What ended the run: recorded, and printed on stderr by whichever process it ended."""
    self.record(text)
    print(text, file=sys.stderr, flush=True)

  def redirect(self, printer: Callable[[str], None] | None, *, details: bool = True) -> None:
    """Sends the screen's share of the lines to `printer`, if so told without those of `detail`; None: to stdout."""
    with self._lock:
      self._print, self._details = printer or to_stdout, details

  def flush(self) -> None:
    self._lines.flush()

  def close(self) -> None:
    self._lines.close()


def get(run_directory: str | None, world: World = SINGLE_WORLD) -> Log:
  """The log of a run directory (local or gs://; None: stdout only). Continues an existing log.txt.

  In a process that is not primary, `line`, `detail` and `record` do nothing, and warnings and errors go to stderr.
  """
  directory = run_directory if world.is_primary else None
  return Log(files.open_lines(directory, LOG_FILE), quiet=not world.is_primary)


def to_stdout(text: str) -> None:
  """A line, or several, to whoever reads stdout; nowhere once nobody does."""
  try:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
  except BrokenPipeError:
    # Whoever read stdout has gone (`| head`, a closed terminal). The file goes on; stdout leads nowhere from here, or
    # what it has buffered would fail again in somebody else's print, or at exit.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
