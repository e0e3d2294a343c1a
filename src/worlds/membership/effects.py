"""What the coordinator decides, for the server to carry out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from worlds.membership.messages import Message


@dataclass(frozen=True)
class Send:
  """Send `message` to every lane of `member`."""

  member: int
  message: Message


@dataclass(frozen=True)
class Kill:
  """End the processes of `member`, for `reason`, which has lasted for `seconds`. Then report it as lost."""

  member: int
  reason: str
  seconds: float


@dataclass(frozen=True)
class Note:
  """A line for the supervisor's log."""

  text: str


Effect = Send | Kill | Note
Effects = list[Effect]


def to_all(members: Iterable[int], message: Message) -> Effects:
  """Returns the effects that send one message, which is encoded once, to these members."""
  return [Send(member, message) for member in sorted(members)]
