"""Lines about a long preparation. It may run in a process of its own, and before the program has a log."""

from __future__ import annotations

import contextlib
import time


def tell(text: str) -> None:
  """Prints a line with its time (UTC). A lost terminal or a full disk does not end the preparation."""
  with contextlib.suppress(OSError):
    print(time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()), text, flush=True)
