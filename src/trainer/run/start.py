"""What an attempt starts from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from trainer.config.schema import Config
from trainer.program import Program
from trainer.run.session import Session
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


def fresh_state(config: Config, session: Session, program: Program) -> TrainState:
  """The state of step 0: with the parameters of load_parameters_path, or with random ones."""
  if session.parameters is None:
    return program.init(jax.random.key(config.run.init_weights_seed))
  source = session.parameters()
  session.log.line(f"The parameters are those of {source.where}.")
  return program.init_from(source.load(program.state.params, session.cluster.world))
