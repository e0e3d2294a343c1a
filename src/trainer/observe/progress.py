"""How steps are shown: a progress bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any, Self

from trainer.observe.log import Log
from trainer.observe.metrics import StepRecord, format_duration, format_step_line

_UPDATE_SECONDS = 0.2


class Progress:
  """Shows each step once, as a printed line or in the bar. log.txt has the line in both cases.

  The training thread only passes numbers to the bar, at most five times a second; rich draws in its own thread. All
  other lines of the log appear above the bar.
  """

  def __init__(
    self, log: Log, *, total_steps: int, total_slices: int, log_period: int, terminal: bool | None = None
  ) -> None:
    """terminal: whether to draw the bar; None: if stdout is a terminal."""
    self._log = log
    self._total_steps, self._total_slices, self._log_period = total_steps, total_slices, log_period
    self._terminal = sys.stdout.isatty() if terminal is None else terminal
    self._bar: Any = None
    self._task: Any = None
    self._drawn = 0.0

  def __enter__(self) -> Self:
    if not self._terminal:
      return self
    from rich import progress  # slow to import, and only needed in a terminal

    columns = (
      progress.TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
      progress.BarColumn(bar_width=None),
      progress.TextColumn("{task.fields[text]}"),
    )
    self._bar = progress.Progress(*columns, refresh_per_second=5, expand=True)
    self._task = self._bar.add_task("train", total=self._total_steps, text="")
    console = self._bar.console
    self._log.redirect(lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True), details=False)
    self._bar.start()
    return self

  def __exit__(self, *error: object) -> None:
    self.close()

  def step(self, record: StepRecord) -> None:
    """Shows a completed step: the bar shows every step; lines show the first, every log_period-th and the last."""
    if record.step % self._log_period == 0 or record.step in (1, self._total_steps):
      self._log.detail(format_step_line(record))
    if self._bar is not None:
      self._draw(record)

  def _draw(self, record: StepRecord) -> None:
    now, last = time.monotonic(), record.step == self._total_steps
    if now - self._drawn < _UPDATE_SECONDS and not last:
      return
    self._drawn = now
    slices = f" | slices {record.slices}/{self._total_slices}" if self._total_slices > 1 else ""
    speed = f"{record.tokens_per_second_per_device:,.0f} tokens/s/device"
    text = f"loss {record.loss:.3f} | {speed}{slices} | eta {format_duration(record.eta)}"
    self._bar.update(self._task, completed=record.step, text=text)

  def close(self) -> None:
    """Leaves the bar on the screen as it is, and prints lines to stdout again. Closing twice is allowed."""
    if self._bar is not None:
      self._bar.stop()
      self._log.redirect(None)
      self._bar = None
