"""The members of a run and its epochs: who is active, who has the state, and what the members are told of a change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from worlds.exit_codes import BAD_INPUT, FAILED
from worlds.membership.dealing import Dealing
from worlds.membership.effects import Effects, Kill, Note, Send, to_all
from worlds.membership.failures import Failures
from worlds.membership.messages import Message, message, to_ranges
from worlds.membership.pulse import Pulse, RunningClock
from worlds.membership.run_rules import RunRules
from worlds.membership.witness import Sums, Witness, alarm_line

_BROKEN_SECONDS = 1.0  # from a broken connection to a new epoch: a death is noticed earlier
_APART_SECONDS, _MOST_APART_SECONDS = 30.0, 600.0  # pause of a member that others cannot reach; doubled each time


@dataclass
class Member:
  lanes: int
  since: float = 0.0  # when it connected, by the clock
  addresses: dict[int, str] = field(default_factory=dict)  # by lane
  newest: int = -1  # the newest step that it can restore; -1: it is not ready
  holds: bool = False  # whether it has the state of this step in memory
  was_active: bool = False
  where: str = ""  # its host and devices
  reports: dict[tuple[Any, ...], set[int]] = field(default_factory=dict)  # (kind, epoch, round): lanes that sent it

  @property
  def ready(self) -> bool:
    return self.newest >= 0

  def set_state(self, newest: int, *, holds: bool) -> None:
    """The member can compute from the state of the step `newest`; -1: it cannot."""
    self.newest, self.holds = newest, holds

  def add_report(self, key: tuple[Any, ...], lane: int) -> bool:
    """Notes that `lane` has sent the report `key`. Returns whether all lanes have."""
    if self.lanes == 1:
      return True
    sent = self.reports.setdefault(key, set())
    sent.add(lane)
    if len(sent) < self.lanes:
      return False
    del self.reports[key]
    return True


@dataclass
class SentState:
  """The last epoch that the members have been told."""

  epoch: int = 0
  members: dict[str, list[str]] = field(default_factory=dict)
  ranges: dict[str, list[list[int]]] = field(default_factory=dict)
  informed_members: set[int] = field(default_factory=set)  # members that got all of this

  def since(self, base: SentState) -> dict[str, Any]:
    """The fields of a message with what has changed since `base`."""
    changed = lambda new, old: {key: value for key, value in new.items() if old.get(key) != value}
    return {
      "base": base.epoch,
      "gone": [int(member) for member in base.members if member not in self.members],
      "members": changed(self.members, base.members),
      "ranges": changed(self.ranges, base.ranges),
    }


class Epochs:
  """The state of a run that its epochs depend on, and how one begins. See `Coordinator`, which has the rules."""

  def __init__(
    self,
    rules: RunRules,
    *,
    run_id: str = "",
    expected: int | None = None,
    clock: Callable[[], float] | None = None,
    hang_seconds: float = 5.0,
    failures: Failures | None = None,
  ) -> None:
    """run_id: of a run whose folder does not exist yet. expected: members that a start waits for (default: all slices);
    after rules.timeout, rules.minimum are enough. clock: default: RunningClock. failures: of the run so far."""
    assert 1 <= rules.minimum <= rules.slices, rules
    self._rules, self._run_id, self._timeout = rules, run_id, rules.timeout
    self._total, self._minimum = rules.slices, rules.minimum
    self._expected = max(expected or rules.slices, rules.minimum)
    self.clock = clock or RunningClock()
    self._members: dict[int, Member] = {}  # connected
    self._waits_since = self.clock()  # of gathering and holding
    self._ready_since: float | None = None  # when the first of the ready members began to wait for others
    self._changed_at = -float("inf")  # when the active members last changed; a start does not count
    self._done: dict[int, int] = {}  # {member that has done the round under way: the checksum of its weights}
    self._round = ""  # that they have done
    self._interruptible: set[int] = set()  # members that have begun the round under way, which may be interrupted
    self._interrupted = False  # it was interrupted, and no round follows
    self._leaving: set[int] = set()
    self._lost: dict[int, tuple[str, float]] = {}  # since the last world or hold: {member: (reason, time on the clock)}
    self._source = -1
    self._broken_at: float | None = None  # when a connection of this epoch was reported as broken
    self._unreached: set[frozenset[int]] = set()  # pairs of members that could not connect in this epoch
    self._stood_still = False  # the exchange of the round under way, in an earlier epoch
    self._apart: dict[int, tuple[float, float]] = {}  # {member that was not reached: (when it may join, its pause)}
    self._dealing = Dealing(rules)
    self.witness = Witness()
    self._sent = SentState()
    self._replaced: set[int] = set()  # members whose start took too long, once
    self._leader = -1  # the member that was asked to lead and has not answered yet
    self._refused: set[int] = set()  # members that have found wrong input since the last leader was asked
    self._told_of_refusal = False  # whether such a member has ended, and has printed its message
    self.failures = failures or Failures(rules.attempts)
    self._survivors: set[int] = set()  # members that may hold the state, when no other one does
    self.pulse = Pulse(
      self.clock, hang_seconds=hang_seconds, start_seconds=rules.timeout, local_steps=rules.local_steps
    )
    self.phase = "gathering"
    self.epoch = 0
    self.active: set[int] = set()
    self.live: set[int] = set()
    self.primary = -1  # writes the records; -1: not chosen yet
    self.committed = ""  # the last committed round
    self._committed_epoch = 0  # and its epoch
    self.stopping = False
    self.code: int | None = None  # the exit code of the run, once it is over

  def end(self, code: int, reason: str = "") -> Effects:
    """The run is over, with this exit code. reason: why it cannot go on."""
    self.phase, self.code = "over", code
    notes: Effects = [Note(reason)] if reason else []
    return notes + to_all(self._members, message("end", code=code, reason=reason))

  def _try_again(self) -> Effects:
    """The run has failed as a whole: ends it after too many attempts."""
    if self.failures.recovers() or self.stopping:
      return []
    most = f"elastic_max_retries={self._rules.attempts}"
    return self.end(FAILED, f"{most}: so many attempts in a row have failed, each before 10 new steps.")

  # ---- members

  def _ready(self) -> dict[int, Member]:
    return {member: found for member, found in self._members.items() if found.ready}

  def _preference(self, member: int) -> tuple[float, bool, int]:
    """Order in which ready members join: the fastest first, and of these members that have returned before spares."""
    return (-self._dealing.speeds.of([member])[member], not self._members[member].was_active, member)

  def _waiting(self) -> list[int]:
    """Ready members that may join if places are free, in the order in which they join."""
    ready = [member for member, found in self._members.items() if found.ready and member not in self.active]
    ready = [member for member in ready if self._apart.get(member, (0.0, 0.0))[0] <= self.clock()]
    return sorted(ready, key=self._preference)

  def _joiners(self) -> list[int]:
    """Ready members that may join now."""
    return self._waiting()[: self._total - len(self.active)]

  def _spare_waits(self, factor: float) -> bool:
    """Whether a member waits that no free place needs, and that was not slower than the median by `factor`."""
    spares = self._waiting()[self._total - len(self.active) :]
    return any(1 / speed < factor for speed in self._dealing.speeds.of(spares).values())

  def _release(self, leave: Collection[int]) -> None:
    """These members end: they are not active any more, and do not join again."""
    self.active = self.active - set(leave)
    self.live -= set(leave)
    self._leaving -= set(leave)
    self.failures.leave(leave)
    for member in leave:
      self._members[member].set_state(-1, holds=False)
      self._dealing.speeds.forget(member)

  def _addresses(self, members: Collection[int]) -> dict[str, list[str]]:
    return {str(m): [address for _, address in sorted(self._members[m].addresses.items())] for m in members}

  # ---- epochs

  def _world(self, *, force: bool = False, keeps: bool = True) -> Effects:
    """Begins an epoch with the active members, or holds if they are too few. force: goes on with any number. keeps: the
    round under way goes on, so members keep all shares that they may have computed."""
    self.epoch += 1
    self._done, self._broken_at, self._unreached, self._leader = {}, None, set(), -1
    self._survivors = set()
    if self._sent.members and self._sent.members.keys() != set(map(str, self.active)):
      self._changed_at = self.clock()
    self.pulse.begin_epoch()
    if self.primary not in self.live:
      self.primary = min(self.live)
    lost = {str(member): [why, self.clock() - at] for member, (why, at) in self._lost.items()}
    self._lost = {}
    if len(self.active) < self._minimum and not self.stopping and not force:
      if self.phase != "holding":
        self.phase, self._waits_since = "holding", self.clock()
        if lost and self.failures.pauses() and (ends := self._try_again()):
          return ends
      return self._tell("hold", lost=lost)
    self.phase = "running"
    self.failures.begins(self.active)
    fresh = sorted(self.active - self.live)
    if self._source not in self.live:
      # Not the primary if there is a choice: it also writes the records.
      self._source = max(self.live - self._leaving or self.live)
    for member in self.active:
      self._members[member].was_active = True
      self._members[member].reports.clear()  # of the epoch before
    self._dealing.deal(self.active, keeps)
    self.witness.begin_epoch(self.active)
    check = self.witness.check(self.epoch)
    before = to_all(self.active, check) if check else []
    moved = [] if keeps else self._tell_slow(self._dealing.moved())
    slow = {str(member): steps for member, steps in self._dealing.slow_steps.items()}
    return [*before, *self._tell("world", lost=lost, fresh=fresh, source=self._source, slow_steps=slow), *moved]

  def _tell(self, kind: str, **fields: Any) -> Effects:
    """Sends the epoch to the active members: what changes to those that got the last one, and everything to others."""
    before, told = self._sent, SentState(self.epoch, self._addresses(self.active))
    if kind == "world":
      told.ranges = {str(member): to_ranges(shares) for member, shares in self._dealing.dealt.items()}
      told.informed_members = set(self.active)
    else:
      told.ranges = {member: ranges for member, ranges in before.ranges.items() if member in told.members}
      told.informed_members = before.informed_members & self.active
    self._sent = told
    fields |= {"epoch": self.epoch, "primary": self.primary, "attempt": self.failures.attempt}
    whole, change = (message(kind, **told.since(base), **fields) for base in (SentState(), before))
    return [Send(member, change if member in before.informed_members else whole) for member in sorted(self.active)]

  def _tell_slow(self, told: Sequence[Message]) -> Effects:
    """Tells the active members the messages `slow`. The primary has them in its log, on the same screen as a rule."""
    return [effect for one in told for effect in to_all(self.active, one)]

  # ---- the witness

  def device(self, member: int, where: str, numerics: str) -> Effects:
    """`member` takes part in the witness. Refuses the run if its members cannot compute the same bits, and once it
    trains, only the member that is unlike the others."""
    found = self._members.get(member)
    if found is None or self.code is not None:
      return []
    found.where = where
    if self.witness.is_alike(numerics):
      return []
    reason = (
      f"witness_period: slice {member} does not compute the bits of the others: it has {numerics}, and they have "
      f"{self.witness.numerics}.\nUse equal chips and versions, or witness_period=0."
    )
    if not self.committed:
      return self.end(BAD_INPUT, reason)
    return [Note(reason), Send(member, message("end", code=BAD_INPUT, reason=reason))]

  def witnessed(self, member: int, epoch: int, sums: Sums) -> Effects:
    """`member` has computed the share of the witness. Its `done` follows."""
    if epoch == self.epoch and member in self.active:
      self.witness.computed(member, sums)
    return []

  def _compared(self) -> tuple[Effects, bool]:
    """What follows from the sums of the witness, and whether the round is committed."""
    found = self.witness.verdict(self.epoch, self.active)
    if found.kind == "equal":
      return [], True
    if found.kind in ("ask", "again"):
      names = ", ".join(map(str, found.members))
      what = "computes the share too" if found.kind == "ask" else "compute the step again: no other slice can decide"
      return [Note(f"Witness of {self._round}: sums of a share differ. Slice {names} {what}."), *self._world()], False
    where = {str(member): self._members[member].where for member in found.members}
    agreed = {str(member): self.witness.agreed[member] for member in found.members if member in self.witness.agreed}
    fields = {"members": list(found.members), "where": where, "agreed": agreed, "arrays": dict(found.arrays)}
    if found.kind == "removed" and self.primary in found.members:
      self.primary = min(self.live - set(found.members))  # it records the alarm
    told = message("alarm", outcome=found.kind, round=self._round, primary=self.primary, **fields)
    line = alarm_line(told)
    effects = to_all(self.active, told)
    if found.kind == "undecided":
      return effects + self.end(FAILED, line), False
    effects.append(Note(line))
    if found.kind == "removed":
      self.failures.exclude(found.members, line)
      effects += [Kill(member, f"it has computed wrong sums of {self._round!r}", 0.0) for member in found.members]
    return effects, found.kind == "transient"

  # ---- connections between members

  def broken(self, member: int, epoch: int, unreached: Sequence[int] = ()) -> Effects:
    """`member` cannot exchange in this epoch: connections have failed. unreached: members it could not connect with."""
    if not all(isinstance(other, int) for other in unreached):
      raise ValueError(f"sent 'broken' with members={unreached}")
    if epoch == self.epoch and member in self.active:
      self._broken_at = self.clock() if self._broken_at is None else self._broken_at
      self._unreached |= {frozenset((member, other)) for other in self._members.keys() & set(unreached) - {member}}
    return []

  def _reconnect(self) -> Effects:
    """Members that are alive cannot exchange: begins an epoch with the same members, which connect again. If that did
    not help, ends one of them: the one with most connections that cannot be made, or one without the sums."""
    seconds = self.pulse.stands_still(self.active)
    if self._is_broken():
      if self._unreached:
        return [self._separate()]
    elif seconds and self._stood_still:
      late = max(self.active - self._done.keys())
      return [Kill(late, f"the exchange has stood still for {seconds:.1f} s again", seconds)]
    elif seconds:
      self._stood_still = True
    else:
      return []
    what = f"The exchange has stood still for {seconds:.1f} s" if seconds else "A connection between members has ended"
    return [Note(f"{what}. The same members connect again."), *self._world()]

  def _is_broken(self) -> bool:
    return self._broken_at is not None and self.clock() - self._broken_at > _BROKEN_SECONDS

  def _separate(self) -> Kill:
    """Ends the member to blame for connections that cannot be made, and keeps it away for a while."""
    pairs = Counter(member for pair in self._unreached for member in pair if member in self.active)
    # One that has no state yet rather than one that trains, and not the one that writes the records.
    victim = max(pairs, key=lambda m: (pairs[m], m not in self.live, m != self.primary, m))
    others = sorted({member for pair in self._unreached if victim in pair for member in pair} - {victim})
    pause = min(2 * self._apart.get(victim, (0.0, _APART_SECONDS / 2))[1], _MOST_APART_SECONDS)
    self._apart[victim] = self.clock() + pause, pause
    names = ", ".join(map(str, others))
    reason = f"no connection between it and member {names}, so it may join again in {pause:g} s at the earliest"
    return Kill(victim, reason, _BROKEN_SECONDS)
