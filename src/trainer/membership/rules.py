"""What a run's supervisor takes from the run's configuration."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

from trainer.membership.coordinator import Coordinator
from trainer.membership.pulse import RunningClock

if TYPE_CHECKING:
  from trainer.config.schema import Config  # slow to import: a child process that supervises has no configuration


# A message must fit into the buffer of a connection, 416 KiB with the default net.core.wmem_max of Linux. Besides the
# addresses, it has up to coordinator._MOST_RANGES ranges of shares.
_MOST_BYTES, _MEMBER_BYTES, _ADDRESS_BYTES = 1 << 18, 200, 128
_MOST_SHARES = 1 << 20  # the supervisor deals them out one by one


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

  def check(self, lanes: int) -> None:
    """Raises ConfigError if the messages about members of so many processes could be too large for a connection."""
    from trainer.config.errors import ConfigError

    size = self.slices * (_MEMBER_BYTES + lanes * _ADDRESS_BYTES)
    if size > _MOST_BYTES:
      most = _MOST_BYTES // (_MEMBER_BYTES + lanes * _ADDRESS_BYTES)
      raise ConfigError(
        f"num_slices={self.slices}: with cluster=multiprocess at most {most} slices of {lanes} processes are possible, "
        "because one message has the addresses of all.\nMake the slices larger, and num_slices smaller."
      )
    if self.shares > _MOST_SHARES:
      raise ConfigError(
        f"elastic_numerics=balanced has num_slices x gradient_accumulation_steps = {self.shares} shares of a step; "
        f"at most {_MOST_SHARES} are possible.\nLower gradient_accumulation_steps, and raise per_device_batch_size."
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
