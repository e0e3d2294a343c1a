"""The progress of the tool: a line every ten seconds."""

from __future__ import annotations

import threading
import time

from trainer.observe.metrics import format_duration
from trainer.tools.tokenize.output import Part

_LINE_SECONDS = 10


class TokenProgress:
  """Prints tokens, tokens per second, and the share of the input that is complete."""

  def __init__(self, size: int) -> None:
    """`size`: bytes of input that this process has to read."""
    self._size = size
    self._lock = threading.Lock()
    self._done = self._tokens = 0
    self._began = self._printed = time.monotonic()

  def add_tokens(self, tokens: int) -> None:
    """Some tokens of a part have been written. Thread safe."""
    with self._lock:
      self._tokens += tokens
      if time.monotonic() - self._printed > _LINE_SECONDS:
        self.print()

  def add_part(self, part: Part) -> None:
    with self._lock:
      self._done += part.size

  def print(self) -> None:
    """Prints the line. Also called at the end."""
    self._printed = time.monotonic()
    seconds = self._printed - self._began
    share = self._done / self._size if self._size else 1.0
    eta = f", eta {format_duration(seconds / share - seconds)}" if 0 < share < 1 else ""
    speed = f"{self._tokens / max(seconds, 1e-9):,.0f} tokens/s"
    print(f"{share:.0%} of {self._size / 1e6:,.1f} MB, {self._tokens:,} tokens, {speed}{eta}", flush=True)
