"""Which member computes which shares: orphaned shares go to members that finish first, and slow members have fewer.
Members that take local steps compute orphaned shares in turns."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from worlds.membership.messages import Message, message, to_ranges
from worlds.membership.run_rules import RunRules
from worlds.membership.speeds import Slow, Speeds

_MOST_RANGES = 2048  # of shares in a message, besides one for each member. Losses divide them; then all are dealt again


class Dealing:
  """The shares of the active members, by their speeds."""

  def __init__(self, rules: RunRules) -> None:
    self._shares, self._group, self._local_steps = rules.shares, rules.group, rules.local_steps
    self.speeds = Speeds()
    self.dealt: dict[int, list[int]] = {}  # of the last epoch
    self._told: dict[int, int] = {}  # {slow member: how many shares the last message `slow` says that it has}

  def deal(self, active: Collection[int], keeps: bool) -> None:
    """Deals all shares to these members. keeps: no member loses a share."""
    speeds = self.speeds.of(active)
    dealt = deal(self._shares, active, self._group, self.dealt, speeds, keeps)
    if sum(len(to_ranges(shares)) for shares in dealt.values()) > len(dealt) + _MOST_RANGES:
      dealt = deal(self._shares, active, self._group, None, speeds)
    self.dealt = dealt

  def computed(self, step: int, seconds: Mapping[int, float], *, in_turns: bool) -> list[Message]:
    """`step` is committed; the active members have computed for so long. in_turns: whether they may compute in turns.
    Returns a message `slow` for each member whose speed has changed."""
    numbers = {member: len(shares) for member, shares in self.dealt.items()}
    equal = in_turns and turns(self.dealt, self._local_steps)
    changed = self.speeds.computed(step, seconds, dict.fromkeys(numbers, 1) if equal else numbers)
    numbers = (changed and self.better()) or numbers
    return [self._message(slow, numbers[slow.member]) for slow in changed]

  def moved(self) -> list[Message]:
    """Shares were dealt again. Returns a message `slow` for each slow member whose number of shares is not that of its
    last message."""
    numbers = {slow: len(self.dealt[slow.member]) for slow in self.speeds.slow}
    return [self._message(slow, number) for slow, number in numbers.items() if number != self._told.get(slow.member)]

  def _message(self, slow: Slow, number: int) -> Message:
    self._told[slow.member] = number
    return message("slow", **slow._asdict(), shares=number, of=self._group)

  def better(self) -> dict[int, int]:
    """{member: how many shares it should have now}, if it is worth an epoch to deal them again; else {}."""
    speeds, now = self.speeds.of(self.dealt), {member: len(shares) for member, shares in self.dealt.items()}
    is_level = max(now.values()) - min(now.values()) <= 1 and min(speeds.values()) == 1
    if self._group == 1 or is_level or not self.speeds.may_deal():  # to count takes a millisecond of 1,024 members
      return {}
    numbers = _numbers(self._shares, speeds, now, dict.fromkeys(now, 1))
    return numbers if self.speeds.gains(now, numbers) else {}


def deal(
  shares: int,
  members: Collection[int],
  group: int,
  before: Mapping[int, Sequence[int]] | None = None,
  speeds: Mapping[int, float] | None = None,
  keeps: bool = False,
) -> dict[int, list[int]]:
  """{member: the shares that it computes}, ascending. Each member gets as many as its speed allows, and at least one if
  there are enough. With equal speeds the numbers differ by at most one.

  group: shares [i * group, (i + 1) * group) travel together if one member has them. before: the last dealing. A member
  keeps as many of its shares as its quota allows, because it may have computed them, and prefers groups that it holds
  most completely: so a member that joins gets the group of the lost member. None: each member gets a group, and the
  rest is dealt. speeds: 1 for all
  members that are not in it. keeps: a member keeps all shares that it has, also if it is slow now."""
  ordered = sorted(members)
  before = before or {member: range(index * group, (index + 1) * group) for index, member in enumerate(ordered)}
  held = {member: [share for share in before.get(member, ()) if share < shares] for member in ordered}
  least = {member: max(len(held[member]) * keeps, int(shares >= len(ordered))) for member in ordered}
  have = {member: len(has) for member, has in held.items()}
  numbers = _numbers(shares, {member: (speeds or {}).get(member, 1.0) for member in ordered}, have, least)
  dealt: dict[int, list[int]] = {}
  for member, has in held.items():
    most = Counter(share // group for share in has)
    dealt[member] = sorted(has, key=lambda share: (-most[share // group], share))[: numbers[member]]
  kept = {share for gets in dealt.values() for share in gets}
  free = iter([share for share in range(shares) if share not in kept])
  for member, gets in dealt.items():
    dealt[member] = sorted([*gets, *itertools.islice(free, numbers[member] - len(gets))])
  return dealt


class Turn(NamedTuple):
  """A replica of local steps that two members compute: `helper` takes its first `steps` steps at the beginning of the
  round, and `member`, which has the share, takes the others at the end."""

  share: int
  member: int
  helper: int
  steps: int


def turns(dealt: Mapping[int, Sequence[int]], steps: int) -> list[Turn]:
  """The replicas of a round of so many steps that are computed in turns, so that all members compute equally long
  (McNaughton's rule, 1959); [] if this gains nothing, or if the members' numbers of shares differ by more than one.

  The replicas form one row of steps, which is cut into equal pieces, a piece for each member. A replica that is cut
  belongs to two members next to each other in the row: the second one begins its piece with it, and the first one ends
  its piece with it, so the replica's first steps are done in time."""
  numbers = [len(shares) for shares in dealt.values()]
  if max(numbers) - min(numbers) > 1:
    return []
  few, many = ([member for member in sorted(dealt) if len(dealt[member]) == n] for n in (min(numbers), max(numbers)))
  row, done, cut = list[int](), 0, list[int]()
  for place in range(1, len(dealt) + 1):
    end = place * sum(numbers) * steps // len(dealt)
    of = few if (done + min(numbers)) * steps >= end else many
    row.append(of.pop(0))
    done += len(dealt[row[-1]])
    cut.append(done * steps - end)
  return [Turn(dealt[one][-1], one, helper, first) for one, helper, first in zip(row, row[1:], cut) if first]


def _numbers(
  shares: int, speeds: Mapping[int, float], have: Mapping[int, int], least: Mapping[int, int]
) -> dict[int, int]:
  """How many shares each member gets, and at least `least` if there are enough: one more goes to the member that would
  finish first, and of several to one that has more now (`have`)."""
  each = shares / sum(speeds.values())
  numbers = {member: max(least[member], int(each * speed + 1e-9)) for member, speed in speeds.items()}
  for _ in range(sum(numbers.values()) - shares):  # what members have more than their speed allows
    late = max(numbers, key=lambda m: (numbers[m] > least[m], numbers[m] > 1, numbers[m] / speeds[m]))
    numbers[late] -= 1
  ends = [((number + 1) / speeds[member], -have[member], member) for member, number in numbers.items()]
  heapq.heapify(ends)
  for _ in range(shares - sum(numbers.values())):
    _, order, member = ends[0]
    numbers[member] += 1
    heapq.heapreplace(ends, ((numbers[member] + 1) / speeds[member], order, member))
  return numbers
