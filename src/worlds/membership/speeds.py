"""How fast each member computes a share, and whether its shares should move to others."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_STEPS = 16  # whose seconds tell a member's speed: a slow one is named after so many
_SLOW, _USUAL = 1.2, 1.1  # times the median: a member is slow from the first on, until it is below the second
_LEAST_SECONDS = 0.005  # that a slow member needs more for a share than the median: less is noise
_PAUSE_STEPS = 20  # from one dealing for speed to the next
_LEAST_GAIN = 0.05  # of the time of the computation, for which shares move

Dealt = Mapping[int, Sequence[int]]


class Slow(NamedTuple):
  """A member that has become slow, or is as fast as the others again (factor 1)."""

  member: int
  factor: float  # its seconds for a share, divided by the median of all members
  since: int  # the step at which this began


class Speeds:
  """The seconds for a share of the active members in the last steps."""

  def __init__(self) -> None:
    self._seconds: dict[int, deque[float]] = {}  # of a share, by member
    self._slow: dict[int, Slow] = {}
    self._dealt_at = -_PAUSE_STEPS  # the step after which shares were dealt for speed
    self._step = 0

  def forget(self, member: int) -> None:
    """`member` is lost: its next process may run elsewhere."""
    self._seconds.pop(member, None)
    self._slow.pop(member, None)

  def computed(self, step: int, seconds: Mapping[int, float], dealt: Dealt) -> list[Slow]:
    """`step` is committed; its members have computed for so long. Returns the members whose speed has changed."""
    self._step = step
    for member, took in seconds.items():
      if shares := len(dealt.get(member, ())):
        self._seconds.setdefault(member, deque(maxlen=_STEPS)).append(took / shares)
    known = {member: own for member, own in self._seconds.items() if len(own) == _STEPS and member in dealt}
    if len(known) < 2:
      return []
    usual = statistics.median(map(statistics.median, known.values()))
    changed = []
    for member, own in sorted(known.items()):
      halves = list(own)[: _STEPS // 2], list(own)[_STEPS // 2 :]
      least, most = (choose(map(statistics.median, halves)) / usual for choose in (min, max))
      was = self._slow.get(member)
      if was is None and least >= _SLOW and (least - 1) * usual >= _LEAST_SECONDS:
        first = next(index for index, one in enumerate(own) if one >= _SLOW * usual)
        self._slow[member] = Slow(member, statistics.median(own) / usual, step - _STEPS + 1 + first)
        changed.append(self._slow[member])
      elif was is not None and most < _USUAL:
        del self._slow[member]
        changed.append(Slow(member, 1.0, step))
      elif was is not None:
        self._slow[member] = was._replace(factor=statistics.median(own) / usual)
    return changed

  @property
  def slow(self) -> Mapping[int, Slow]:
    """The members that are slow now."""
    return self._slow

  def of(self, members: Sequence[int]) -> dict[int, float]:
    """Shares per second of each member, relative to those that are not slow."""
    return {member: 1 / self._slow[member].factor if member in self._slow else 1.0 for member in members}

  def gains(self, before: Dealt, after: Dealt) -> bool:
    """Whether shares should move now from the dealing `before` to `after`, of the same members."""
    if self._step < self._dealt_at + _PAUSE_STEPS:
      return False
    speeds = self.of(list(before))
    now, then = (max(len(own) / speeds[member] for member, own in dealt.items()) for dealt in (before, after))
    return then <= (1 - _LEAST_GAIN) * now

  def dealt(self) -> None:
    """Shares have moved for speed after the last step."""
    self._dealt_at = self._step
