"""The state of runs as metrics of Prometheus, from the files of the runs: for `/metrics` of `tools.watch`.

Ages are computed at each request. So the ages of a run that is dead grow, while its other numbers stay as they were.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trainer.config.errors import ConfigError
from trainer.observe import files
from trainer.observe.events import EVENTS_FILE
from trainer.observe.metrics import METRICS_FILE, number, valid_records
from trainer.report import history, incidents
from trainer.report.history import Events

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


class _Told:
  """What the events of a run say about it."""

  def __init__(self, events: Events) -> None:
    self.numbers: dict[str, Any] = {"slices_lost": 0, "recoveries": 0}
    self.alive_since = 0.0  # wall time of the last loss or return
    self.saved: dict[str, dict[Any, float]] = {}  # tier: step: wall time of the commit
    self._ready: set[str] = set()  # processes that have restored a state
    for event in events:
      self._add(event)

  def _add(self, event: dict[str, Any]) -> None:
    kind, numbers, tier = event["kind"], self.numbers, str(event.get("tier"))
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
        numbers["slices_alive"], self.alive_since = len(event["slices"]), event["wall"]
    elif kind == "recovery":
      numbers["recoveries"] += 1
    elif kind == "eval":
      numbers["evaluation_loss"] = event.get("loss")
    elif kind == "checkpoint_saved":
      self.saved.setdefault(tier, {})[event.get("step")] = event["wall"]
    elif kind == "checkpoint_rejected":
      self.saved.get(tier, {}).pop(event.get("step"), None)


class Exporter:
  """Metrics of several runs, each with its name as a label. Safe in threads."""

  def __init__(self, runs: Callable[[], Mapping[str, str]], clock: Callable[[], float] = time.time) -> None:
    """runs: returns the folders of the runs by their names. Raises ConfigError while there are none."""
    self._runs, self._clock = runs, clock
    self._told: dict[str, tuple[object, _Told]] = {}  # by folder: the signature of the events, and what they say
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
      found: dict[str, _Numbers] = {}
      for name, folder in runs.items():
        try:
          numbers, saved = self._numbers(folder, self._clock())
          found[name] = {**numbers, "readable": 1}, saved
        except (ConfigError, OSError):
          found[name] = {"readable": 0}, {}
      return found

  def _numbers(self, folder: str, now: float) -> _Numbers:
    """The numbers of one run. Reads the events if they have changed, and the end of metrics.jsonl. Raises OSError if
    the folder cannot be read."""
    signature = files.signature(folder, EVENTS_FILE)
    if not signature and not files.exists(folder):
      raise FileNotFoundError(folder)
    if self._told.get(folder, (None,))[0] != signature:
      self._told[folder] = signature, _Told(history.clean_events(files.read_json_lines(folder, EVENTS_FILE)))
    told = self._told[folder][1]
    found = dict(told.numbers)
    records = list(valid_records(files.read_last_json_lines(folder, METRICS_FILE)))
    step: dict[str, Any] = next((record for record in reversed(records) if "loss" in record), {})
    found |= {"step": step.get("step"), "loss": step.get("loss"), "tokens": step.get("tokens")}
    found["learning_rate"] = step.get("lr")
    wall = number(step.get("wall"))
    if wall is not None and math.isfinite(wall):
      found["seconds_since_step"] = max(0.0, now - wall)
      if wall > told.alive_since:
        found["slices_alive"] = step.get("slices")
    return found, {tier: max(0.0, now - max(saved.values())) for tier, saved in told.saved.items() if saved}
