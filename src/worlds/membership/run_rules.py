"""How many members a run has, and how long its supervisor waits for them."""

from __future__ import annotations

import dataclasses

# A message must fit into the buffer of a connection, 416 KiB with the default net.core.wmem_max of Linux. Besides the
# addresses, it has up to coordinator._MOST_RANGES ranges of shares. It is compressed: random IPv6 addresses, the worst
# case, need 42 bytes for a member of one process, and 32 for each of several (tests/worlds/membership/test_scale.py).
_MOST_BYTES, _MEMBER_BYTES, _ADDRESS_BYTES = 1 << 18, 16, 48
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
  timeout: float = 300.0  # longest wait for members, at a start and when there are too few, in seconds
  join_interval: float = 0.0  # shortest time from one change of members to the next member that joins, in seconds
  # Whether the run goes on without a member that is lost or leaves. Otherwise a loss ends the run with code 1, and
  # SIGTERM to one member is a request to all.
  elastic: bool = True
  # In a row, each of which ends before 10 new steps: after so many the run ends with code 1. None: no limit. An attempt
  # ends when too few members are left, or when all that computed have been lost, one after the other.
  attempts: int | None = None
  # A member that is slower than the median by this factor, for long, is replaced if another one waits. 0: never.
  slow_factor: float = 0.0
  local_steps: int = 1  # of a round, which a member computes without the others

  @property
  def group(self) -> int:
    """Shares of a slice."""
    return max(1, self.shares // self.slices)
