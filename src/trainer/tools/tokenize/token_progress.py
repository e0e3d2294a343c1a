"""The progress of the tool: a bar in a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any, Self

from trainer.observe.metrics import format_duration
from trainer.tools.tokenize.output import Part

_LINE_SECONDS = 10


class TokenProgress:
  """Shows tokens, tokens per second, and the share of the input that is complete."""

  def __init__(self, size: int) -> None:
    """`size`: bytes of input that this process has to read."""
    self._size = size
    self._lock = threading.Lock()
    self._done = 0
    self._tokens = 0
    self._began = self._printed = time.monotonic()
    self._bar: Any = None
    self._task: Any = None

  def __enter__(self) -> Self:
    if sys.stdout.isatty():
      from rich import progress  # slow to import, and only needed in a terminal

      columns = progress.BarColumn(bar_width=None), progress.TextColumn("{task.fields[text]}")
      self._bar = progress.Progress(*columns, refresh_per_second=5, expand=True)
      self._task = self._bar.add_task("tokenize", total=self._size, text="")
      self._bar.start()
    return self

  def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
    if self._bar is not None:
      self._bar.stop()
    if error is None:
      print(self._text(), flush=True)

  def add_tokens(self, tokens: int) -> None:
    """Some tokens of a part have been written. Thread safe."""
    with self._lock:
      self._tokens += tokens
      self._show()

  def add_part(self, part: Part) -> None:
    with self._lock:
      self._done += part.size
      self._show()

  def _text(self) -> str:
    seconds = time.monotonic() - self._began
    share = self._done / self._size if self._size else 1.0
    eta = f", eta {format_duration(seconds / share - seconds)}" if 0 < share < 1 else ""
    speed = f"{self._tokens / max(seconds, 1e-9):,.0f} tokens/s"
    return f"{share:.0%} of {self._size / 1e6:,.1f} MB, {self._tokens:,} tokens, {speed}{eta}"

  def _show(self) -> None:
    if self._bar is not None:
      self._bar.update(self._task, completed=self._done, text=self._text())
    elif time.monotonic() - self._printed > _LINE_SECONDS:
      self._printed = time.monotonic()
      print(self._text(), flush=True)
