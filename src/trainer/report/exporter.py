"""The state of runs as metrics of Prometheus, from the files of the runs: for `/metrics` of `tools.watch`.

Ages are computed at each request. So the ages of a run that is dead grow, while its other numbers stay as they were.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from input_pipeline import storage
from trainer.config.errors import ConfigError
from trainer.observe import files
from trainer.observe.events import EVENTS_FILE
from trainer.observe.metrics import METRICS_FILE, number, valid_records
from trainer.report import history, incidents

# Metric without `trainer_`: what it is, whether it is a counter. A number that is not known yet has no sample.
_METRICS = {
  "step": ("Last completed step.", False),
  "steps_wanted": ("Steps of the whole run.", False),
  "loss": ("Training loss of the last step, in nats per token.", False),
  "evaluation_loss": ("Last evaluation loss, in nats per token.", False),
  "learning_rate": ("Learning rate of the last step.", False),
  "tokens": ("Tokens of the run so far.", False),
  "slices_alive": ("Slices alive: of the last step, or of a loss or return after it.", False),
  "slices_wanted": ("Slices of the whole run.", False),
  "seconds_since_step": ("Seconds since the last completed step.", False),
  "slices_lost": ("Losses of slices.", True),
  "recoveries": ("Recoveries from lost and returned slices.", True),
  "exit_code": ("Exit code of the newest process, if it has ended.", False),
  "readable": ("1; 0 if the files of the run cannot be read now.", False),
}
_AGE = (
  "trainer_seconds_since_checkpoint",
  "Seconds since the newest committed checkpoint that was not rejected, by tier.",
)

_Numbers = tuple[Mapping[str, Any], Mapping[str, float]]  # values of _METRICS; age of the checkpoint of each tier


class Follower:
  """The numbers of one run. Reads only what was appended to events.jsonl, and the end of metrics.jsonl."""

  def __init__(self, directory: str) -> None:
    self._directory = directory
    self._reset()

  def _reset(self) -> None:
    self._read = 0  # bytes of events.jsonl
    self._file: Any = None  # its inode; in an object store, the signature of its parts
    self._numbers: dict[str, Any] = {"slices_lost": 0, "recoveries": 0}
    self._alive_since = 0.0  # wall time of the last loss or return
    self._saved: dict[str, dict[Any, float]] = {}  # tier: step: wall time of the commit
    self._ready: set[str] = set()  # processes that have restored a state

  def numbers(self, now: float) -> _Numbers:
    """Returns the values of _METRICS, and the age of the newest checkpoint of each tier. Raises OSError if the folder
    cannot be read."""
    for event in history.clean_events(self._new_events()):
      self._add(event)
    found = dict(self._numbers)
    records = list(valid_records(files.read_last_json_lines(self._directory, METRICS_FILE)))
    step: dict[str, Any] = next((record for record in reversed(records) if "loss" in record), {})
    found |= {"step": step.get("step"), "loss": step.get("loss"), "tokens": step.get("tokens")}
    found["learning_rate"] = step.get("lr")
    wall = number(step.get("wall"))
    if wall is not None and math.isfinite(wall):
      found["seconds_since_step"] = max(0.0, now - wall)
      if wall > self._alive_since:
        found["slices_alive"] = step.get("slices")
    return found, {tier: max(0.0, now - max(saved.values())) for tier, saved in self._saved.items() if saved}

  def _new_events(self) -> Iterator[dict[str, Any]]:
    """The records of events.jsonl since the last call; all of them if the file was replaced, or has grown in an object
    store."""
    if storage.is_address(self._directory):
      if (parts := files.parts_signature(self._directory, EVENTS_FILE)) == self._file:
        return iter(())
      self._reset()
      self._file = parts
      return files.read_json_lines(self._directory, EVENTS_FILE)
    if not (path := Path(self._directory) / EVENTS_FILE).exists() and path.parent.exists():
      return iter(())
    status = path.stat()
    if status.st_ino != self._file or status.st_size < self._read:
      self._reset()
      self._file = status.st_ino
    records, self._read = files.read_json_lines_from(self._directory, EVENTS_FILE, self._read)
    return iter(records)

  def _add(self, event: dict[str, Any]) -> None:
    kind, numbers, tier = event["kind"], self._numbers, str(event.get("tier"))
    if kind == "run_start":
      numbers |= {"steps_wanted": event.get("steps"), "slices_wanted": event.get("num_slices")}
    elif kind in ("init_done", "primary"):
      self._ready.add(event["process"])
      numbers["exit_code"] = None
    elif kind == "run_end" and (event["exit"] != 2 or event["process"] in self._ready):  # else it was refused
      numbers["exit_code"] = event["exit"]
    elif kind in ("slice_down", "slice_up"):
      numbers["slices_lost"] = numbers["slices_lost"] + incidents.slices_of(event) * (kind == "slice_down")
      if isinstance(event.get("slices"), list):
        numbers["slices_alive"], self._alive_since = len(event["slices"]), event["wall"]
    elif kind == "recovery":
      numbers["recoveries"] += 1
    elif kind == "eval":
      numbers["evaluation_loss"] = event.get("loss")
    elif kind == "checkpoint_saved":
      self._saved.setdefault(tier, {})[event.get("step")] = event["wall"]
    elif kind == "checkpoint_rejected":
      self._saved.get(tier, {}).pop(event.get("step"), None)


class Exporter:
  """Metrics of several runs, each with its name as a label. Safe in threads."""

  def __init__(self, runs: Callable[[], Mapping[str, str]], clock: Callable[[], float] = time.time) -> None:
    """runs: returns the folders of the runs by their names. Raises ConfigError while there are none."""
    self._runs, self._clock = runs, clock
    self._followers: dict[str, Follower] = {}
    self._lock = threading.Lock()

  def answer(self, accept: str) -> tuple[bytes, str]:
    """The body and the type of an answer to a request with this header Accept. Raises ModuleNotFoundError without
    prometheus_client."""
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import choose_encoder

    encode, kind = choose_encoder(accept)
    registry = CollectorRegistry()
    registry.register(self)
    return encode(registry), kind

  def collect(self) -> Iterator[Any]:
    """Yields the metrics, as prometheus_client asks a collector for them."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    families = {
      name: (CounterMetricFamily if counts else GaugeMetricFamily)(f"trainer_{name}", text, labels=["run"])
      for name, (text, counts) in _METRICS.items()
    }
    ages = GaugeMetricFamily(*_AGE, labels=["run", "tier"])
    for name, (numbers, saved) in self._all().items():
      run = name.encode("utf-8", "backslashreplace").decode()
      for metric, value in numbers.items():
        if (known := number(value)) is not None:
          families[metric].add_metric([run], known)
      for tier, age in saved.items():
        ages.add_metric([run, tier], age)
    yield from (*families.values(), ages)

  def _all(self) -> dict[str, _Numbers]:
    """The numbers of each run. The files of one run, whatever is wrong with them, do not hide another run."""
    with self._lock:
      try:
        runs = self._runs()
      except (ConfigError, OSError):
        runs = {}
      self._followers = {folder: self._followers.get(folder) or Follower(folder) for folder in runs.values()}
      found: dict[str, _Numbers] = {}
      for name, folder in runs.items():
        try:
          numbers, saved = self._followers[folder].numbers(self._clock())
          found[name] = {**numbers, "readable": 1}, saved
        except (ConfigError, OSError):
          found[name] = {"readable": 0}, {}
      return found
