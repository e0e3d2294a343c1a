"""The report of a run that still goes on, or a list of runs, made again when files have changed: for `tools.watch`."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from input_pipeline import storage
from trainer.config.errors import ConfigError
from trainer.observe import files
from trainer.observe.events import EVENTS_FILE
from trainer.observe.metrics import METRICS_FILE, format_duration
from trainer.report import goodput, history, incidents, list_page, markup, page
from trainer.report.history import RunHistory
from trainer.report.list_page import Row

_LARGEST_SHARE = 0.25  # of the time that making pages may take: the machine may be training
_RECENT_STEPS = 50


@dataclasses.dataclass(frozen=True)
class State:
  version: int  # changes with `body`
  body: str  # HTML
  notice: str  # one line of text about the run as it is now
  is_late: bool  # whether the notice is a warning


class LivePage:
  """The report of one run, or the list of several runs or of the runs in a folder that is no run.

  Safe in threads; the work happens in `state`.
  """

  def __init__(self, directories: Sequence[str], period: float, clock: Callable[[], float] = time.time) -> None:
    """period: seconds for which a page is not made again."""
    self._directories = list(directories)
    self.period, self._clock = period, clock
    self._lock = threading.Lock()
    self._seen: list[Sequence[object]] | None = None  # of the files, when the page was made; None: make it
    self._version, self._body = 0, "<p>Waiting for the first step.</p>"
    self._run: RunHistory | None = None
    self._listed: dict[str, tuple[object, Row]] = {}  # folder in a folder of runs: its signature, its row
    self._next = float("-inf")  # time from which the page may be made again
    self._problem: str | None = None  # why the files cannot be read, since `_failing_since`
    self._failing_since = 0.0

  def state(self) -> State:
    """The newest page. Made again if the files have changed and the last page is old enough.

    Never raises because of the files: while they cannot be read, the last page stays, and the notice says why.
    """
    with self._lock:
      if self._clock() >= self._next:
        self._update()
      if self._problem is None:
        return State(self._version, self._body, *_notice(self._run, self._clock()))
      since = time.strftime("%H:%M:%S", time.gmtime(self._failing_since))
      if not self._version:  # nothing was seen yet: the run may only begin
        return State(0, self._body, f"{self._problem}. Waiting since {since} UTC", False)
      return State(self._version, self._body, f"Cannot read the run since {since} UTC: {self._problem}", True)

  def _update(self) -> None:
    """Makes the page again if needed, or says what is wrong with the files."""
    began = time.monotonic()
    try:
      runs, body = self.runs(), self._body
      seen = [_signature(folder) for folder in runs.values()]
      if [*runs.values()] != self._directories[:1]:
        body = self._list(runs, seen)  # the state of a run changes while its files do not
      elif seen != self._seen:
        self._run = history.load_with_steps(self._directories[0])
        body = page.body(self._run, goodput.compute(self._run))[0]
      self._version += body != self._body or seen != self._seen
      self._body, self._seen, self._problem = body, seen, None
    except (ConfigError, OSError) as error:
      if self._problem is None:
        self._failing_since = self._clock()
      self._problem, self._seen = str(error), None
    finally:
      spent = time.monotonic() - began
      self._next = self._clock() + max(self.period, spent / _LARGEST_SHARE)

  def runs(self) -> dict[str, str]:
    """The folders of the runs of this page, by a name that no other run of the page has and that an address can have.
    ConfigError if a folder of runs does not exist."""
    first, *others = self._directories
    if not others and (folders := runs_in(first)):
      return {str(Path(folder).relative_to(first)): folder for folder in folders}
    names = [directory.rstrip("/").rpartition("/")[2] for directory in self._directories]
    return {
      directory.strip("/") if names.count(name) > 1 else name: directory
      for name, directory in zip(names, self._directories)
    }

  def _list(self, runs: Mapping[str, str], signatures: Sequence[object]) -> str:
    """The list of the runs. Reads only the runs whose files have changed."""
    for (name, folder), signature in zip(runs.items(), signatures):
      if self._listed.get(folder, (None,))[0] != signature:
        self._listed[folder] = signature, list_page.read(folder, name)
    return list_page.body([self._listed[folder][1] for folder in runs.values()], self._clock())


def runs_in(directory: str) -> list[str]:
  """The folders of runs in `directory` and in its folders, by name; [] if `directory` is a run, or not local.

  ConfigError if it does not exist.
  """
  if storage.is_address(directory) or _signature(directory):
    return []
  found = (Path(directory).glob(f"{depth}/{name}") for depth in ("*", "*/*") for name in (METRICS_FILE, EVENTS_FILE))
  return sorted({str(path.parent) for paths in found for path in paths})


def _signature(directory: str) -> Sequence[object]:
  """The signatures of the line files that exist. ConfigError without a folder."""
  if not storage.is_address(directory) and not Path(directory).exists():
    raise ConfigError(f"{directory} does not exist")
  return [found for name in (METRICS_FILE, EVENTS_FILE) if (found := files.signature(directory, name))]


def _notice(run: RunHistory | None, now: float) -> tuple[str, bool]:
  """How far the run is, and whether it has not ended and writes nothing any more. None: a list of runs."""
  if run is None:
    return "", False
  text, total = f"step {run.progress()}", int(run.start.get("steps") or 0)
  if run.end is not None:
    return f"{text}, ended with exit code {run.end.get('exit')}", False
  if total:
    left = max(0.0, total - run.steps[-1]["step"])
    text += f", {format_duration(float(np.median(run.steps['seconds'][-_RECENT_STEPS:])) * left)} left"
  failing = _failing_saves(run, now)
  silent = now - run.last_wall
  troubled = [line.rstrip(".") for line in incidents.incident_summary(run)]
  late = bool(failing) or silent > list_page.patience(run) or bool(troubled)
  text += f", {failing}" if failing else ""
  return "; ".join([f"{text}, last record {format_duration(silent)} ago", *troubled]), late


def _failing_saves(run: RunHistory, now: float) -> str:
  """Since when the saves in storage fail, and how old the newest checkpoint is; "" if the last one did not fail."""
  kinds = ("checkpoint_saved", "checkpoint_failed")
  saves = [event for event in run.of_kind(*kinds) if event.get("tier") == "persistent"]
  failed = list(itertools.takewhile(lambda event: event["kind"] == "checkpoint_failed", reversed(saves)))
  if not failed:
    return ""
  first, last = failed[-1], failed[0]
  since = time.strftime("%H:%M:%S", time.gmtime(first["wall"]))
  if "newest" not in last:
    return f"saves fail since {since} UTC, and no checkpoint is in storage"
  age = format_duration(now - last["wall"] + float(last.get("newest_seconds") or 0.0))
  return f"saves fail since {since} UTC: the newest checkpoint is of step {last['newest']}, from {age} ago"


@functools.cache
def shell() -> str:
  """What a browser loads once. Its script fetches `state` from the same server and shows what is new."""
  script = Path(__file__).with_name("page.js").read_text()
  return markup.page("Run", markup.macros().live(script))
