"""What an attempt starts from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from trainer import optimizers
from trainer.config import Config
from trainer.run_data import RunData
from trainer.state import TrainState


@dataclasses.dataclass(frozen=True)
class Start:
  """The state that an attempt starts from, after `step` completed steps; tier "none": a fresh state."""

  state: TrainState
  step: int
  tier: str
  seconds: float
  evaluated: bool  # whether this state has been evaluated
  meta: Mapping[str, Any] | None = None
  eval_loss: float | None = None  # of this state, if an earlier process or attempt has recorded it


def may_resume(config: Config, data: RunData, meta: Mapping[str, Any], log: Callable[[str], None]) -> None:
  """Raises ConfigMismatch if the run may not resume from a checkpoint with this meta. Logs harmless differences."""
  for change in data.accept(config, meta):
    log(f"Changed since the checkpoint: {change}")
  if rise := optimizers.rise(config.optimizer, config.run.steps, meta["config"], meta["step"]):
    log(f"warning: {rise}")
