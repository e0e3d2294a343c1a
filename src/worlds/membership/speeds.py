"""How fast each member computes a share, and whether its shares should move to others."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

_STEPS = 16  # whose seconds tell a member's speed, or rounds of local steps: a slow one is named after so many
_SLOW, _USUAL = 1.2, 1.1  # times the median: a member is slow from the first on, until it is below the second
_LEAST_SECONDS = 0.005  # that a slow member needs more for a share than the median: less is noise
_PAUSE_STEPS = 20  # from one dealing for speed to the next


class Slow(NamedTuple):
  """A member that has become slow, or is as fast as the others again (factor 1)."""

  member: int
  factor: float  # its seconds for a share, divided by the median of all members
  since: int  # the step at which this began


class Speeds:
  """The seconds for a share of the active members in the last steps, relative to the median of all in the same step.
  With an even number of members, the median is the faster middle value, so that one of two members can count as
  slow."""

  def __init__(self) -> None:
    self._factors: dict[int, deque[float]] = {}  # of the last steps, by member
    self._slow: dict[int, Slow] = {}  # lost members too: one that starts again at the same place is probably still slow
    self._told: dict[int, float] = {}  # {slow member: the factor that was told since its process started}
    self._hosts: dict[int, str] = {}
    self._since_dealt = _PAUSE_STEPS  # steps, or rounds, since shares were dealt for speed
    self._newest = deque[int](maxlen=_STEPS)  # the last steps

  def starts(self, member: int, host: str) -> None:
    """A process of `member` has started on this host."""
    if self._hosts.get(member) != host:
      self._hosts[member] = host
      self._slow.pop(member, None)

  def forget(self, member: int) -> None:
    """`member` is lost: its next process is measured anew."""
    self._factors.pop(member, None)
    self._told.pop(member, None)

  def computed(self, step: int, seconds: Mapping[int, float], numbers: Mapping[int, float]) -> list[Slow]:
    """`step` is committed; its members have computed so many shares for so long. Returns the members whose speed has
    changed, or that have started again and are still slow."""
    self._since_dealt += 1
    self._newest.append(step)
    each = {member: took / numbers[member] for member, took in seconds.items() if numbers.get(member)}
    if len(each) < 2:
      return []
    usual = statistics.median_low(each.values()) or _LEAST_SECONDS
    changed = []
    for member, per_share in each.items():
      factor = per_share / usual
      factors = self._factors.get(member) or self._factors.setdefault(member, deque(maxlen=_STEPS))
      factors.append(factor)
      if (factor >= _SLOW or member in self._slow) and len(factors) == _STEPS:  # so thousands of others cost little
        changed += self._judge(member, list(factors), usual)
    return changed

  def _judge(self, member: int, factors: list[float], usual: float) -> list[Slow]:
    """Whether the member is slow now. Returns it if it must be named."""
    halves = factors[: _STEPS // 2], factors[_STEPS // 2 :]
    least, most = (choose(map(statistics.median, halves)) for choose in (min, max))
    factor, was = statistics.median(factors), self._slow.get(member)
    if was is None:
      if least < _SLOW or (least - 1) * usual < _LEAST_SECONDS:
        return []
      since = next(step for step, one in zip(self._newest, factors, strict=True) if one >= _SLOW)
      was, is_news = Slow(member, factor, since), True
    elif most < _USUAL:
      del self._slow[member]
      self._told.pop(member, None)
      return [Slow(member, 1.0, self._newest[-1])]
    elif most >= _SLOW * least or factor < _USUAL:  # it changes: the next steps tell its new speed
      return []
    else:
      told = self._told.get(member, 0.0)
      is_news = not told / _SLOW < factor < told * _SLOW
    self._slow[member] = was._replace(factor=factor)
    if not is_news:
      return []
    self._told[member] = factor
    return [self._slow[member]]

  @property
  def slow(self) -> list[Slow]:
    """The members that are slow now, as measured in the last steps."""
    return [slow for member, slow in self._slow.items() if len(self._factors.get(member, ())) == _STEPS]

  def newest_factor(self, member: int) -> float:
    """The factor of a member in the last steps, also while its speed changes."""
    return statistics.median(self._factors[member])

  def of(self, members: Iterable[int]) -> dict[int, float]:
    """Shares per second of each member, relative to those that are not slow."""
    return {member: 1 / self._slow[member].factor if member in self._slow else 1.0 for member in members}

  def may_deal(self) -> bool:
    """Whether enough steps have passed since shares were dealt for speed."""
    return self._since_dealt >= _PAUSE_STEPS

  def dealt(self) -> None:
    """Shares have moved for speed after the last step."""
    self._since_dealt = 0
