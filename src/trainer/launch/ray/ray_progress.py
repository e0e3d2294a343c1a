"""How far a run is, read from the files of its folder."""

from __future__ import annotations

import collections
from typing import Any

from trainer.checkpoint.step_folders import StepFolders
from trainer.observe import files
from trainer.observe.metrics import METRICS_FILE
from trainer.world import SINGLE_WORLD


def newest_metrics(run_directory: str) -> dict[str, Any]:
  """The last record of a step; {} before the first."""
  steps = (record for record in files.read_last_json_lines(run_directory, METRICS_FILE) if "loss" in record)
  return next(iter(collections.deque(steps, maxlen=1)), {})


def newest_checkpoint(run_directory: str) -> int:
  """The step of the newest committed persistent checkpoint; -1: there is none."""
  return max(StepFolders(f"{run_directory}/checkpoints", SINGLE_WORLD, print).steps(), default=-1)
