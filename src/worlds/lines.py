"""Lines that a process prints: each begins with its time."""

from __future__ import annotations

import sys
import textwrap
import time


def timed(text: str) -> str:
  """Returns `text` with month, day and time (UTC) in front of each line that is not blank."""
  return textwrap.indent(text, time.strftime("%m-%d %H:%M:%S ", time.gmtime()))


def tell(text: str) -> None:
  """Prints lines on stdout, with their time."""
  print(timed(text), flush=True)


def warn(text: str) -> None:
  """Prints a warning on stderr, with its time."""
  print(timed(f"warning: {text}"), file=sys.stderr, flush=True)
