"""Reading the records of a run takes time in proportion to their number: runs have up to a million steps."""

from __future__ import annotations

import json
import time

import pytest

from trainer.observe import metrics
from trainer.report import goodput, history

SMALL, TIMES = 4000, 4
# Linear work takes 4 times as long for 4 times the records, quadratic work 16 times; between the two lies the limit.
LIMIT = 8


def write_run(path, steps: int):
  """metrics.jsonl of a run that went back 10 steps after every 1,000, and events.jsonl with a save every 10 steps."""
  path.mkdir()
  with open(path / "metrics.jsonl", "w") as lines, open(path / "events.jsonl", "w") as events:
    stamp = {"process": "p", "attempt": 1}
    for at in range(steps):
      clock = {"wall": 1e9 + at, "monotonic": float(at)}
      step = at + 1 - 10 * (at // 1000)
      record = {"step": step, "loss": 1.0, "seconds": 1.0, "slices": 1, "data_wait": 0.1, "tokens": step, "lr": 0.1}
      lines.write(json.dumps(record | {"grad_norm": 1.0} | stamp | clock) + "\n")
      if at % 10 == 0:
        lines.write(json.dumps({"step": step, "eval_loss": 1.0} | stamp | clock) + "\n")
        saved = {"kind": "checkpoint_saved", "step": step, "tier": "persistent", "blocking_seconds": 0.1, "seconds": 2}
        events.write(json.dumps(saved | stamp | clock) + "\n")
  return str(path)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
  folder = tmp_path_factory.mktemp("scale")
  return [write_run(folder / str(steps), steps) for steps in (SMALL, SMALL * TIMES)]


def cpu_seconds(function, argument) -> float:
  """Least of three: other processes can only make it longer."""
  found = []
  for _ in range(3):
    began = time.process_time()
    function(argument)
    found.append(time.process_time() - began)
  return min(found)


@pytest.mark.parametrize(
  "function", [metrics.read_metrics, history.load, lambda run: goodput.compute(history.load(run))]
)
def test_time_grows_in_proportion_to_the_records(runs, function):
  small, large = (cpu_seconds(function, run) for run in runs)
  assert large < LIMIT * small, f"{TIMES} times the records took {large / small:.1f} times as long"
