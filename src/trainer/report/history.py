"""A run read back from its files, for reports and comparisons."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from trainer.observe import metrics
from trainer.observe.events import read_events, without_refused
from trainer.report import goodput

Records = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Run:
  """What a run directory tells about the run."""

  directory: str
  name: str
  steps: Records  # the history as it stands, one record per step in order, each with a loss
  evals: Records  # records with eval_loss, in order
  lost: Records  # step records that were done again later
  events: Records  # of the processes that were not refused
  goodput: dict[str, Any]
  start: dict[str, Any]  # the newest run_start of these, {} if there is none

  @property
  def total_slices(self) -> int:
    return max([int(self.start.get("num_slices") or 0), *(s["slices"] for s in self.steps)], default=0)

  def of_kind(self, *kinds: str) -> Records:
    return [event for event in self.events if event["kind"] in kinds]

  def tokens_per_second(self) -> list[float]:
    """Of the whole cluster, for each record of `steps`: the step's tokens by its seconds (nan where unknown)."""
    rates, before = [], None
    for record in self.steps:
      tokens = self.start.get("tokens_per_step")
      if not tokens and before is not None and record["step"] == before["step"] + 1:
        tokens = record["tokens"] - before["tokens"]
      rates.append(tokens / record["seconds"] if tokens and record["seconds"] > 0 else math.nan)
      before = record
    return rates


def load(run_directory: str) -> Run:
  """Reads a run directory, local or gs://. ValueError if there is no run, or no completed step yet."""
  events = without_refused(read_events(run_directory))
  history = metrics.read_metrics(run_directory)
  steps = [record for record in history if "loss" in record]
  if not steps:
    raise ValueError(f"{run_directory}: no completed step in metrics.jsonl: nothing to report on")
  kept = {(record["process"], record["monotonic"]) for record in steps}
  done = [record for record in metrics.read_records(run_directory) if "loss" in record]
  starts = [event for event in events if event["kind"] == "run_start"]
  return Run(
    directory=run_directory,
    name=str(starts[-1]["run"]) if starts and starts[-1].get("run") else run_directory.rstrip("/").split("/")[-1],
    steps=steps,
    evals=[record for record in history if "eval_loss" in record],
    lost=[record for record in done if (record["process"], record["monotonic"]) not in kept],
    events=events,
    goodput=goodput.compute(run_directory),
    start=starts[-1] if starts else {},
  )
