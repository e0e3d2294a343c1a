"""Which member computes which shares: orphaned shares go to members that finish first, and slow members have fewer.
Members that take local steps compute the replicas of lost and slow members in turns."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from worlds.membership.messages import Message, message, to_ranges
from worlds.membership.run_rules import RunRules
from worlds.membership.speeds import Slow, Speeds

_LEAST_GAIN = 0.05  # of the time of the computation, for which shares move
_MOST_RANGES = 2048  # of shares in a message, besides one for each member. Losses divide them; then all are dealt again

Dealt = Mapping[int, Sequence[int]]  # {member: its shares}, ascending


class Dealing:
  """The shares of the active members, by their speeds."""

  def __init__(self, rules: RunRules) -> None:
    self._shares, self._group, self._local_steps = rules.shares, rules.group, rules.local_steps
    self.speeds = Speeds()
    self.dealt: dict[int, list[int]] = {}  # of the last epoch
    self.slow_steps: dict[int, int] = {}  # see `turns`
    self._told: dict[int, tuple[int, int]] = {}  # {slow member: shares and steps in its last message `slow`}

  def deal(self, active: Collection[int], keeps: bool) -> None:
    """Deals all shares to these members. keeps: no member loses a share."""
    speeds = self.speeds.of(active)
    dealt = deal(self._shares, active, self._group, self.dealt, speeds, keeps)
    if sum(len(to_ranges(shares)) for shares in dealt.values()) > len(dealt) + _MOST_RANGES:
      dealt = deal(self._shares, active, self._group, None, speeds)
    self.dealt, self.slow_steps = dealt, slow_steps(dealt, self._local_steps, speeds)

  def computed(self, step: int, seconds: Mapping[int, float], *, in_turns: bool) -> list[Message]:
    """`step` is committed; the active members have computed for so long. in_turns: whether they may compute in turns.
    Returns a message `slow` for each member whose speed has changed."""
    taken = turns(self.dealt, self._local_steps, self.slow_steps) if in_turns else []
    changed = self.speeds.computed(step, seconds, _computed(self.dealt, self._local_steps, taken))
    dealt, slow = (changed and self.better()) or (self.dealt, self.slow_steps)
    return [self._message(one, len(dealt[one.member]), slow.get(one.member, 0)) for one in changed]

  def moved(self) -> list[Message]:
    """Shares were dealt again. Returns a message `slow` for each slow member whose work is not that of its last
    message."""
    work = {slow: (len(self.dealt[slow.member]), self.slow_steps.get(slow.member, 0)) for slow in self.speeds.slow}
    return [self._message(slow, *has) for slow, has in work.items() if has != self._told.get(slow.member)]

  def _message(self, slow: Slow, shares: int, steps: int) -> Message:
    self._told[slow.member] = shares, steps
    return message("slow", **slow._asdict(), shares=shares, of=self._group, steps=steps)

  def better(self) -> tuple[Dealt, dict[int, int]] | None:
    """As many shares as each member should have now, and `slow_steps`, if it is worth an epoch to deal again."""
    speeds, steps = self.speeds.of(self.dealt), self._local_steps
    now = {member: len(shares) for member, shares in self.dealt.items()}
    is_level = max(now.values()) - min(now.values()) <= 1 and min(speeds.values()) == 1 and not self.slow_steps
    # To count takes a millisecond of 1,024 members.
    if self._group == steps == 1 or is_level or not self.speeds.may_deal():
      return None
    numbers = _numbers(self._shares, speeds, now, dict.fromkeys(now, 1))
    dealt: Dealt = {member: range(number) for member, number in numbers.items()}
    slow = slow_steps(dealt, steps, speeds)
    gains = _time(dealt, steps, speeds, slow) <= (1 - _LEAST_GAIN) * _time(self.dealt, steps, speeds, self.slow_steps)
    return (dealt, slow) if gains else None


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


def turns(dealt: Dealt, steps: int, slow: Mapping[int, int]) -> list[Turn]:
  """The replicas of a round of so many steps that are computed in turns, so that all members compute equally long
  (McNaughton's rule, 1959). slow: {member: how many steps of its only replica it takes}; the first steps of the replica
  are another member's. Returns [] if turns gain nothing, or if the other members' numbers of shares differ by more than
  one.

  The replicas form one row of steps, which is cut into equal pieces, a piece for each member. A replica that is cut
  belongs to two members next to each other in the row: the second one begins its piece with it, and the first one ends
  its piece with it, so the replica's first steps are done in time. A slow member takes no first steps, because another
  one would wait for them. So it begins a row, which has a smaller piece for it, and there are as many rows."""
  fast = [member for member in sorted(dealt) if member not in slow]
  numbers, rows = [len(dealt[member]) for member in fast], max(1, len(slow))
  if (
    steps == 1 or len(fast) < rows or max(numbers) - min(numbers) > 1 or any(len(dealt[member]) != 1 for member in slow)
  ):
    return []
  firsts = [[member] for member in slow] or [[]]
  return list(itertools.chain(*(_row(dealt, steps, slow, first, fast[i::rows]) for i, first in enumerate(firsts))))


def _row(dealt: Dealt, steps: int, slow: Mapping[int, int], row: list[int], fast: Sequence[int]) -> list[Turn]:
  """The turns of one row: of the slow member that `row` has, if any, and of these members after it."""
  numbers = [len(dealt[member]) for member in fast]
  least, most = min(numbers), max(numbers)
  few, many = ([member for member in fast if len(dealt[member]) == n] for n in (least, most))
  done, begun = len(row), sum(min(steps, slow[member]) for member in row)  # replicas, and steps up to the first cut
  cut, rest = [done * steps - begun] * done, (done + sum(numbers)) * steps - begun
  for place in range(1, len(fast) + 1):
    end = begun + place * rest // len(fast)
    of = few if (done + least) * steps >= end else many
    row.append(of.pop(0))
    done += len(dealt[row[-1]])
    cut.append(done * steps - end)
  return [Turn(dealt[one][-1], one, helper, first) for one, helper, first in zip(row, row[1:], cut) if first]


def slow_steps(dealt: Dealt, steps: int, speeds: Mapping[int, float]) -> dict[int, int]:
  """{slow member: how many steps of its replica it takes in a round of so many, see `turns`}; {} if that gains nothing.
  It has half of the time that is left to it for its steps: the other half is for the way of the replica."""
  slow = [member for member in sorted(dealt) if speeds[member] < 1]
  if steps == 1 or not slow or len(dealt) < 2 * len(slow):
    return {}
  fast = len(dealt) - len(slow)
  left = steps * (sum(map(len, dealt.values())) / fast - 1)  # after the first steps, if the slow members took none
  takes = {one: int(left / (2 * (1 / speeds[one] - 1) + len(slow) / fast)) for one in slow}
  found = {member: min(steps, max(1, takes)) for member, takes in takes.items()}
  return found if _time(dealt, steps, speeds, found) < _time(dealt, steps, speeds, {}) else {}


def _time(dealt: Dealt, steps: int, speeds: Mapping[int, float], slow: Mapping[int, int]) -> float:
  """The time of a round of so many steps in shares of a member that is not slow."""
  taken = turns(dealt, steps, slow)
  seconds = [number * steps / speeds[member] for member, number in _computed(dealt, steps, taken).items()]
  seconds += [turn.steps / speeds[turn.helper] + (steps - turn.steps) / speeds[turn.member] for turn in taken]
  return max(seconds) / steps


def _computed(dealt: Dealt, steps: int, taken: Sequence[Turn]) -> dict[int, float]:
  """{member: how many shares it computes, with parts of those that are computed in turns}."""
  numbers: dict[int, float] = {member: len(shares) for member, shares in dealt.items()}
  for turn in taken:
    numbers[turn.member] -= turn.steps / steps
    numbers[turn.helper] += turn.steps / steps
  return numbers


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
