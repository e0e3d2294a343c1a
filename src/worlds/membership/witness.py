"""The witness of a step: several members compute one share of it, and their sums must be equal before the commit.

Every member draws the share and the second member by itself, from (seed, step) and the dealing of the epoch. The
coordinator compares what it gets. If sums differ, it asks other members for the same share, until most of them agree.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from worlds.membership.messages import Message, message

Sums = Mapping[str, Sequence[int]]  # {array: (a checksum of its values, how many of their bits are 1)}, modulo 2^32


class Drawn(NamedTuple):
  """The share that is compared, and the members that compute it: its owner, and a second one if there is any."""

  share: int
  members: tuple[int, ...]


def draw(seed: int, check: int, dealt: Mapping[int, Sequence[int]]) -> Drawn:
  """Returns what check number `check` of a run compares. Of as many checks in a row as there are shares, from a
  multiple of their number on, each compares another share. dealt: {member: shares}."""
  shares = sum(map(len, dealt.values()))
  cycle, place = divmod(check, shares)
  first, stride = _number(shares, seed, cycle, "first"), _number(shares, seed, cycle, "stride")
  while math.gcd(stride, shares) != 1:
    stride += 1
  share = (first + place * stride) % shares
  owner = next(member for member, own in dealt.items() if share in own)
  others = sorted(dealt.keys() - {owner})
  second = (others[_number(len(others), seed, check, "second")],) if others else ()
  return Drawn(share, (owner, *second))


def _number(count: int, *what: object) -> int:
  """A number below `count` that follows from `what`, in every process and version of Python alike."""
  return int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=8).digest(), "little") % count


class Verdict(NamedTuple):
  """What the sums of a share say.

  equal: commit. transient: the same, but `members` had other sums before all computed again; none: the sums differ, and
  no majority tells who is wrong. ask: `members` shall compute the share, too. again: all members shall compute all
  their shares again. removed: the sums of `members` are wrong. undecided: no other member can be asked, and they differ
  again, or only one of those that differed is left. arrays: {array: how many bits differ, at least}.
  """

  kind: Literal["equal", "transient", "ask", "again", "removed", "undecided"]
  members: tuple[int, ...] = ()
  arrays: Mapping[str, int] = {}


@dataclasses.dataclass
class Witness:
  """The witness of the round under way, as the coordinator knows it."""

  sums: dict[int, Sums] = dataclasses.field(default_factory=dict)  # {member: its sums of the share}, in this epoch
  asked: list[int] = dataclasses.field(default_factory=list)  # members that compute the share; none: as drawn
  since: int = 0  # sums that were computed in earlier epochs do not count
  before: dict[int, Sums] = dataclasses.field(default_factory=dict)  # what was computed before `since`
  differ: Mapping[str, int] = dataclasses.field(default_factory=dict)  # arrays, as in `Verdict`, of this round
  # {member: the last round in which its sums were compared and equal}
  agreed: dict[int, str] = dataclasses.field(default_factory=dict)
  numerics: str = ""  # what the bits of the members' sums depend on; "": not known yet

  def is_alike(self, numerics: str) -> bool:
    """Whether a member with these numerics computes the bits of the others. The first member sets them."""
    self.numerics = self.numerics or numerics
    return numerics == self.numerics

  def computed(self, member: int, sums: Sums) -> None:
    self.sums[member] = sums

  def begin_epoch(self, active: Collection[int]) -> None:
    """The round is repeated by these members."""
    self.sums = {}
    self.asked = [member for member in self.asked if member in active]

  def committed(self, round_name: str) -> None:
    if len(self.sums) > 1:
      self.agreed |= dict.fromkeys(self.sums, round_name)
    self.sums, self.asked, self.since, self.before, self.differ = {}, [], 0, {}, {}

  def check(self, epoch: int) -> Message | None:
    """What members must know before this epoch; None: they draw."""
    if not (self.asked or self.since):
      return None
    return message("check", epoch=epoch, asked=self.asked, since=self.since)

  def verdict(self, epoch: int, active: Collection[int]) -> Verdict:
    """What follows from the sums, for the epochs after `epoch`. active: members that can compute the share."""
    found = {member: json.dumps(sums, sort_keys=True) for member, sums in self.sums.items()}
    counts = Counter(found.values()).most_common()
    suspect = self._is_suspect()
    if len(counts) < 2 and not suspect:
      return self._transient() if self.before else Verdict("equal")
    if len(counts) > 1:
      (most, number), (_, next_number) = counts[:2]
      odd = tuple(sorted(member for member in found if found[member] != most))
      right = next(member for member in found if found[member] == most)
      self.differ = _difference(self.sums[odd[0]], self.sums[right])
      if number > next_number:
        return Verdict("removed", odd, self.differ)
    if more := sorted(set(active) - found.keys())[:1]:
      self.asked = sorted({*found, *more})
      return Verdict("ask", tuple(more), self.differ)
    if self.before or suspect:
      return Verdict("undecided", tuple(sorted(found)), self.differ)
    self.asked, self.since, self.before = sorted(found), epoch + 1, self.sums
    return Verdict("again", tuple(sorted(found)), self.differ)

  def _is_suspect(self) -> bool:
    """Whether one member is left of those whose sums differed, and has not computed what another one had before."""
    others = [sums for member, sums in self.before.items() if member not in self.sums]
    return bool(self.asked) and len(self.sums) == 1 and next(iter(self.sums.values())) not in others

  def _transient(self) -> Verdict:
    changed = sorted(member for member, sums in self.sums.items() if self.before.get(member, sums) != sums)
    arrays = [_difference(self.before[member], self.sums[member]) for member in changed]
    return Verdict("transient", tuple(changed), {name: bits for one in arrays for name, bits in one.items()})


def _difference(one: Sums, other: Sums) -> dict[str, int]:
  """{array: how many of its bits differ, at least}. Both have the same arrays."""
  signed = lambda number: (number + (1 << 31)) % (1 << 32) - (1 << 31)
  return {name: max(1, abs(signed(ones[1] - other[name][1]))) for name, ones in one.items() if ones != other[name]}


def alarm_line(alarm: Mapping[str, Any]) -> str:
  """The message `alarm`, or its record in events.jsonl, in words."""
  who = " and ".join(f"slice {member} ({alarm['where'].get(str(member), '?')})" for member in alarm["members"])
  bits = ", ".join(f"{name} ({bits})" for name, bits in sorted(alarm["arrays"].items()))
  what = f"Witness of {alarm['round']}: arrays that differ, with the least number of bits: {bits}."
  if alarm["outcome"] == "removed":
    agreed = ", ".join(alarm["agreed"].get(str(member), "none") for member in alarm["members"])
    return (
      f"{what} Wrong sums from {who}: the others agree. It is taken out and does not return by itself. Its last "
      f"comparison without a difference: {agreed}. Steps since then may have used wrong sums."
    )
  if alarm["outcome"] == "transient":
    blamed = f"{who} computed other bits the first time" if who else "it is not known which slice was wrong"
    return f"{what} All members computed the step again and agree: {blamed}. The run goes on."
  return (
    f"{what} Wrong sums may come from {who}, and no other slice can decide. No step with these sums is committed. Test "
    "the chips of all slices that computed. The same command continues from the last checkpoint."
  )
