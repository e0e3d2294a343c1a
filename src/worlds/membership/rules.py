"""How many members a run has, and how long its supervisor waits for them."""

from __future__ import annotations

import dataclasses
import time

from worlds.membership.coordinator import Coordinator
from worlds.membership.pulse import RunningClock

# A message must fit into the buffer of a connection, 416 KiB with the default net.core.wmem_max of Linux. Besides the
# addresses, it has up to coordinator._MOST_RANGES ranges of shares.
_MOST_BYTES, _MEMBER_BYTES, _ADDRESS_BYTES = 1 << 18, 200, 128
MOST_SHARES = 1 << 20  # the supervisor deals them out one by one


def most_members(lanes: int) -> int:
  """Members of `lanes` processes whose addresses one message has room for."""
  return _MOST_BYTES // (_MEMBER_BYTES + lanes * _ADDRESS_BYTES)


@dataclasses.dataclass(frozen=True)
class RunRules:
  """All fields are JSON values."""

  slices: int  # the most members that compute at a time
  minimum: int  # the fewest
  shares: int  # of a step's work
  timeout: float  # longest wait for members, in seconds
  join_interval: float  # shortest time from one change of members to the next member that joins, in seconds
  elastic: bool  # whether the run goes on when a member is lost

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
