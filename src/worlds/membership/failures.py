"""What the ends of members mean: how long each one stays away, and when the run cannot go on."""

from __future__ import annotations

import dataclasses
import signal
from collections import Counter
from collections.abc import Collection

from worlds.exit_codes import BAD_INPUT, FAILED
from worlds.membership.messages import step_of

PROGRESS = 10  # rounds that were not done before: after so many, earlier failures do not count any more
_FIRST_PAUSE_SECONDS = 0.5  # from the end of a member to its next start; doubled each time
_LONGEST_PAUSE_SECONDS = 300.0
_LONGEST_WAIT_SECONDS = 30.0  # the same while the run waits for members
_REPEATED = 2  # failures in a row that are no accident
# Exit codes of a process that has failed by itself. Other signals come from outside: they say nothing about it.
_CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
_FAILURES = frozenset({FAILED, BAD_INPUT, *(-number for number in _CRASHES)})


@dataclasses.dataclass
class _Member:
  host: str = ""
  rounds: int = 0  # new rounds that it had computed in its earlier lives
  ends: int = 0  # in a row, each before it had computed PROGRESS new rounds
  failures: int = 0  # in a row, by itself and without a new round
  code: int = 0  # of the last one of these


class Failures:
  """Counts failures against progress: those of each member against the rounds that this member has computed, and those
  of the run against its new steps. A round that was committed before is no progress."""

  def __init__(self, attempts: int | None = None) -> None:
    """attempts: see RunRules."""
    self.attempt = 1
    self._attempts = attempts
    self._new_steps = 0  # since the last recovery
    self._furthest = 0, False  # (step, whether it is evaluated) of the newest round that was ever committed
    self._rounds: Counter[int] = Counter()  # new rounds, by the member that has computed them
    self._members: dict[int, _Member] = {}
    self.excluded: dict[int, str] = {}  # {member that does not return: the reason}
    self._steady: set[int] = set()  # members that compute and were not lost since the last recovery

  @property
  def progress(self) -> bool:
    """Whether any round was committed."""
    return bool(self._rounds)

  def committed(self, round_name: str, active: Collection[int]) -> None:
    """The active members have computed the round."""
    place = int(round_name.split()[1]), step_of(round_name) is None
    if place <= self._furthest:
      return
    self._furthest = place
    self._rounds.update(active)
    self._new_steps += step_of(round_name) is not None
    if self._new_steps >= PROGRESS:
      self.attempt = 1

  # ---- one member

  def ended(self, member: int, code: int | None, host: str, *, waits: bool) -> tuple[int, float]:
    """The member has ended with this exit code, or minus the number of a signal; None: unknown. waits: whether the run
    waits for members. Returns how often it has ended in a row without progress of its own, and the seconds until its
    next start."""
    found = self._members.setdefault(member, _Member())
    if found.host != host:
      found.host, found.ends, found.failures = host, 0, 0
    new, found.rounds = self._rounds[member] - found.rounds, self._rounds[member]
    found.ends = 1 if new >= PROGRESS else found.ends + 1
    if code in _FAILURES:
      found.failures, found.code = 1 if new else found.failures + 1, code
    else:
      found.failures = 0
    longest = _LONGEST_WAIT_SECONDS if waits else _LONGEST_PAUSE_SECONDS
    if member in self.excluded:
      return 1, float("inf")
    return found.ends, min(_FIRST_PAUSE_SECONDS * 2.0 ** min(found.ends - 1, 30), longest)

  def refuses(self, member: int) -> None:
    """The member has found an error of the configuration or the input, and will end."""
    found = self._members.setdefault(member, _Member())
    found.failures, found.code, found.rounds = max(found.failures, 1), BAD_INPUT, self._rounds[member]

  def exclude(self, members: Collection[int], reason: str) -> None:
    """These members have computed wrong sums. They do not return, until `allow_again`."""
    self.excluded |= dict.fromkeys(members, reason)

  def allow_again(self, members: Collection[int]) -> None:
    """A person has replaced these members."""
    for member in members:
      self.excluded.pop(member, None)

  def failing(self) -> dict[int, int]:
    """{member that would fail again, because it has done nothing since it failed: its last exit code}. Wrong input is
    no accident while nothing has worked."""
    first = 1 if not self.progress else _REPEATED
    found = [(member, each) for member, each in self._members.items() if self._rounds[member] == each.rounds]
    return {m: each.code for m, each in found if each.failures >= (first if each.code == BAD_INPUT else _REPEATED)}

  def unreliable(self) -> set[int]:
    """Members that ended again and again: nobody should wait for them."""
    return {member for member, found in self._members.items() if found.ends >= _REPEATED} | self.excluded.keys()

  # ---- the run

  def begins(self, active: Collection[int]) -> None:
    """The active members compute from now on."""
    self._steady = self._steady or set(active)

  def leave(self, members: Collection[int]) -> None:
    """Active members end in good order."""
    self._steady -= set(members)

  def loses(self, member: int) -> bool:
    """An active member is lost. Whether all that computed have been lost since the last recovery: a failure that one
    member has alone leaves the others, so it is no failure of the run."""
    was_steady = member in self._steady
    self._steady.discard(member)
    return was_steady and not self._steady

  def pauses(self) -> bool:
    """A loss leaves too few members. Whether that is a new failure of the run."""
    was_steady, self._steady = bool(self._steady), set()
    return was_steady

  def recovers(self) -> bool:
    """The run has failed as a whole, and tries again. Whether it may."""
    self.attempt, self._new_steps = self.attempt + 1, 0
    return self._attempts is None or self.attempt <= self._attempts
