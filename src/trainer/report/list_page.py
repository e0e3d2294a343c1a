"""The list of the runs in a folder: their states and numbers, one row each. page.js sorts it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable

from trainer.config.errors import ConfigError
from trainer.report import goodput, history, markup
from trainer.report.history import RunHistory

_LATE_SECONDS = 60.0  # without a record, and no step took so long: nobody may be writing any more
_START_SECONDS = 600.0  # the same before the first step, which may have to be compiled
_HEADINGS = (
  "run",
  "state",
  "steps",
  "training loss",
  "evaluation loss",
  "learning rate",
  "goodput",
  "last record (UTC)",
)


def patience(run: RunHistory) -> float:
  """Seconds without a record after which a run that has not ended seems to be dead."""
  return max(_LATE_SECONDS, 10 * float(run.steps["seconds"].max())) if len(run.steps) else _START_SECONDS


@dataclasses.dataclass(frozen=True)
class Row:
  """A run in the list, as it was read from its files."""

  name: str
  cells: tuple[tuple[str, object], ...] = ()  # text, and what it is sorted by; () if there are no steps
  problem: str = ""  # why there are none
  exit_code: int | None = None
  last: float = 0.0
  patience: float = _START_SECONDS

  def state(self, now: float) -> tuple[str, str]:
    """What the run does, and the class of these words in the style sheet."""
    if self.exit_code is None:
      return ("running", "good") if now - self.last <= self.patience else ("stale or dead", "bad")
    if self.exit_code == 0:
      return "finished", "sub"
    return f"ended (exit code {self.exit_code})", "sub" if self.exit_code in (42, 130, 143) else "bad"


def read(folder: str, name: str) -> Row:
  try:
    run = history.load(folder)
  except (ConfigError, OSError) as error:
    return Row(name, problem=str(error))
  last, code = run.last_wall, None if run.end is None else int(run.end["exit"])
  try:
    run.require_steps()
  except ConfigError as error:
    return Row(name, (), str(error), code, last)
  step, loss = run.steps[-1], run.last_loss()[0]
  share = goodput.compute(run)["goodput_percent"]
  evaluation = float(run.evals[-1]["eval_loss"]) if len(run.evals) else None
  cells = (
    (run.progress(), step["step"]),
    (f"{loss:.4f}", loss),
    ("" if evaluation is None else f"{evaluation:.4f}", "" if evaluation is None else evaluation),
    (f"{step['lr']:.3g}", step["lr"]),
    (f"{share:.2f} %", share),
    (time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(last)), last),
  )
  return Row(name, cells, "", code, last, patience(run))


def body(rows: Iterable[Row], now: float) -> str:
  shown = [(row, *row.state(now)) for row in rows]
  return markup.macros().runs(markup.count(len(shown), "run"), _HEADINGS, shown)
