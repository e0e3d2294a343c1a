"""How steps are shown: plain lines, and in a terminal a progress bar with a plain line now and then."""

from __future__ import annotations

import sys
import time
from typing import Any, Self

from trainer.observe.log import Log
from trainer.observe.metrics import StepRecord, format_duration, format_step_line

_UPDATE_SECONDS = 0.2
_LINE_SECONDS = 60.0  # between the lines of steps in a terminal, and of a round under way elsewhere


class Progress:
  """Shows each step once. log.txt has the line of the first, of every log_period-th and of the last step.

  A terminal has a bar, and above it all other lines of the log, with a line of the first step of this process, of a
  step in every minute, of the steps before an evaluation, and of the last step: they stay, and the bar does not. The
  training thread only passes numbers to the bar, at most five times a second; rich draws in its own thread.
  """

  def __init__(
    self,
    log: Log,
    *,
    total_steps: int,
    total_slices: int,
    log_period: int,
    eval_interval: int = -1,
    terminal: bool | None = None,
  ) -> None:
    """eval_interval: steps between evaluations, or -1. terminal: whether to draw the bar; None: if stdout is one."""
    self._log = log
    self._total_steps, self._total_slices = total_steps, total_slices
    self._log_period, self._eval_interval = log_period, eval_interval
    self._terminal = sys.stdout.isatty() if terminal is None else terminal
    self._bar: Any = None
    self._task: Any = None
    self._drawn = 0.0
    self._printed: float | None = None  # when the last line of a step was printed in the terminal
    self._shown = time.monotonic()  # when the last step was shown, or told of

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
    self._shown = time.monotonic()
    if self._is_printed(record.step):
      self._log.line(format_step_line(record))
    elif record.step % self._log_period == 0 or record.step in (1, self._total_steps):
      self._log.detail(format_step_line(record))
    if self._bar is not None:
      self._draw(record)

  def under_way(self, step: int) -> None:
    """Moves the bar to `step`, which is done in a round whose steps are shown when it is committed. Without a bar, a
    line in every minute of such a round."""
    now = time.monotonic()
    if self._bar is not None and now - self._drawn >= _UPDATE_SECONDS:
      self._drawn = now
      self._bar.update(self._task, completed=step)
    elif self._bar is None and now - self._shown >= _LINE_SECONDS:
      self._shown = now
      self._log.line(f"step {step}/{self._total_steps} is done; its line comes with those of its round of local steps")

  def _is_printed(self, step: int) -> bool:
    """Whether the terminal gets the line of this step, too."""
    if self._bar is None:
      return False
    due = step == self._total_steps or (self._eval_interval > 0 and step % self._eval_interval == 0)
    now = time.monotonic()
    if not due and self._printed is not None and now - self._printed < _LINE_SECONDS:
      return False
    self._printed = now
    return True

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
