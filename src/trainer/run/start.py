"""What an attempt starts from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

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
  stops: bool = False  # the process must stop: it saves this state and computes nothing more
