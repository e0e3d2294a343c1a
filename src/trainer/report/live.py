"""The report of a run that still goes on, made again when its files have changed; for `trainer.tools.watch`."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from trainer.config.errors import ConfigError
from trainer.observe import files
from trainer.observe.events import EVENTS_FILE
from trainer.observe.metrics import METRICS_FILE, format_duration
from trainer.report import comparison_page, goodput, history, page
from trainer.report.history import Run

_LARGEST_SHARE = 0.25  # of the time that making pages may take: the machine may be training
_LATE_SECONDS = 60.0  # without a record, and no step took so long: the notice is a warning
_RECENT_STEPS = 50
_POLL_MILLISECONDS = 2000


@dataclasses.dataclass(frozen=True)
class State:
  """What a browser shows."""

  version: int  # changes with `body`
  body: str  # HTML
  notice: str  # one line of text about the run as it is now
  is_late: bool  # whether the notice is a warning


class LivePage:
  """The report of one run, or the comparison of several. Safe in threads; the work happens in `state`."""

  def __init__(self, directories: Sequence[str], period: float, clock: Callable[[], float] = time.time) -> None:
    """period: seconds for which a page is not made again."""
    self._directories = list(directories)
    self._period, self._clock = period, clock
    self._lock = threading.Lock()
    self._seen: list[object] = []  # of the files, when the page was made
    self._state = State(0, "<p>Waiting for the first step.</p>", "", False)
    self._runs: list[Run] = []
    self._next = float("-inf")  # time from which the page may be made again
    self._failing_since: float | None = None

  def state(self) -> State:
    """The newest page. Made again if the files have changed and the last page is old enough.

    Never raises because of the files: while they cannot be read, the last page stays, and the notice says why.
    """
    with self._lock:
      problem = None
      if self._clock() >= self._next:
        problem = self._update()
      if problem is None and self._failing_since is None:
        notice, late = _notice(self._runs, self._clock())
        self._state = dataclasses.replace(self._state, notice=notice, is_late=late)
      elif problem is not None:
        since = time.strftime("%H:%M:%S", time.gmtime(self._failing_since))
        self._state = dataclasses.replace(
          self._state, notice=f"Cannot read the run since {since} UTC: {problem}", is_late=True
        )
      return self._state

  def _update(self) -> str | None:
    """Makes the page again if needed. Returns what is wrong with the files, else None."""
    began = time.monotonic()
    try:
      seen = [_signature(directory, name) for directory in self._directories for name in (METRICS_FILE, EVENTS_FILE)]
      if seen != self._seen or self._failing_since is not None:
        self._runs = [history.load_with_steps(directory) for directory in self._directories]
        body = _body(self._runs)
        self._state = dataclasses.replace(self._state, body=body, version=self._state.version + 1)
        self._seen = seen
      self._failing_since = None
      return None
    except (ConfigError, OSError) as error:
      if self._failing_since is None:
        self._failing_since = self._clock()
      return str(error)
    finally:
      spent = time.monotonic() - began
      self._next = self._clock() + max(self._period, spent / _LARGEST_SHARE)


def _body(runs: list[Run]) -> str:
  if len(runs) > 1:
    return comparison_page.body(runs)
  return page.body(runs[0], goodput.compute(runs[0]))[0]


def _signature(directory: str, name: str) -> object:
  """A value that changes when the line file grows or is replaced; None while it does not exist."""
  if files.is_object_store(directory):
    return files.parts_signature(directory, name)
  path = Path(directory) / name
  try:
    status = os.stat(path)
  except FileNotFoundError:
    if not Path(directory).exists():
      raise ConfigError(f"{directory} does not exist any more") from None
    return None
  return status.st_ino, status.st_size, status.st_mtime_ns


def _notice(runs: list[Run], now: float) -> tuple[str, bool]:
  """How far the runs are, and whether one of them that has not ended writes nothing any more."""
  texts, late = [], False
  for run in runs:
    last = run.steps[-1]
    total = int(run.start.get("steps") or 0)
    text = f"{run.name}: " if len(runs) > 1 else ""
    text += f"step {run.progress()}"
    if run.end is not None:
      texts.append(f"{text}, ended with exit code {run.end.get('exit')}")
      continue
    recent = run.steps["seconds"][-_RECENT_STEPS:]
    if total:
      text += f", {format_duration(float(np.median(recent)) * max(0.0, total - last['step']))} left"
    silent = now - max(float(last["wall"]), max((event["wall"] for event in run.events), default=0.0))
    limit = max(_LATE_SECONDS, 10 * float(run.steps["seconds"].max()))
    late = late or silent > limit
    texts.append(f"{text}, last record {format_duration(silent)} ago")
  return "; ".join(texts), late


def shell() -> str:
  """The page that a browser loads once. It fetches `state` from the same server and shows what is new."""
  return _SHELL.replace("PERIOD_MS", str(_POLL_MILLISECONDS))


_SHELL = """<p id="notice" class="notice" role="status"></p><main id="main"></main><script>
let version = -1;
const main = document.getElementById("main"), notice = document.getElementById("notice");
const label = (item) => item.firstChild.textContent.replace(/[0-9,]/g, "");
async function refresh() {
  try {
    const answer = await fetch("state?version=" + version, { cache: "no-store" });
    const state = await answer.json();
    notice.textContent = state.notice;
    notice.classList.toggle("late", state.is_late);
    if (state.body !== null) {
      const open = new Set([...main.querySelectorAll("details[open]")].map(label));
      main.innerHTML = state.body;
      main.querySelectorAll("details").forEach((item) => { item.open = open.has(label(item)); });
      version = state.version;
    }
  } catch (error) {
    notice.textContent = "The watch command does not answer. Start it again to see new steps.";
    notice.classList.add("late");
  }
  setTimeout(refresh, PERIOD_MS);
}
refresh();
</script>"""
