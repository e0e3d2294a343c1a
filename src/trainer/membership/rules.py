"""What a run's supervisor takes from the run's configuration."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

from trainer.membership.coordinator import Coordinator
from trainer.membership.pulse import RunningClock

if TYPE_CHECKING:
  from trainer.config.schema import Config  # slow to import: a child process that supervises has no configuration


@dataclasses.dataclass(frozen=True)
class RunRules:
  """How many members a run has, and how long it waits for them. All fields are JSON values."""

  slices: int  # the most members that compute at a time
  minimum: int  # the fewest
  shares: int  # of a step's work
  timeout: float  # longest wait for members, in seconds
  join_interval: float  # shortest time from one change of members to the next member that joins, in seconds
  elastic: bool  # whether the run goes on when a member is lost

  @classmethod
  def of(cls, config: Config) -> RunRules:
    """The rules of a run of num_slices slices."""
    elastic, slices = config.elastic, config.cluster.num_slices
    minimum = elastic.elastic_min_slice_count if elastic.elastic_enabled else slices
    balanced = elastic.elastic_numerics == "balanced"
    return cls(
      slices,
      slices if minimum == -1 else minimum,
      slices * (config.optimizer.gradient_accumulation_steps if balanced else 1),
      elastic.elastic_timeout_seconds,
      elastic.elastic_min_resize_interval_seconds,
      elastic.elastic_enabled,
    )

  def coordinator(self, run_id: str, expected: int | None = None) -> Coordinator:
    """A coordinator with these rules. expected: members that a start waits for (default: slices)."""
    return Coordinator(
      self.slices,
      self.minimum,
      clock=RunningClock(),
      wall=time.time,
      run_id=run_id,
      shares=self.shares,
      expected=expected,
      timeout=self.timeout,
      join_interval=self.join_interval,
      elastic=self.elastic,
    )
