"""Signs of life of the members, and which of them must be considered hung."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator

_STEPS = 200  # whose times give the limit
_FACTOR = 3.0  # the limit is this multiple of the 99th percentile of the step time, or of the longest first computation
_LATER_SECONDS = 1.0  # how much later an exchange that stands still counts: a member's silence says more
_START_SILENCE_SECONDS = 30.0  # limit while a member imports and compiles, which delays the thread of its signs
_BUSY_SECONDS = 1800.0  # limit while a member saves or samples: such work has its own limits
_LATE_SECONDS = 0.6  # since the last of the signs that a process gives twice a second
_MOST_LATE_SECONDS = 0.5  # that a reading of the clock adds: the supervisor reads it every 0.1 s


class RunningClock:
  """Seconds in which this process ran: time.monotonic() without the time in which it was stopped (Ctrl-Z, a container
  that is paused, swapping). Signs of life that arrived meanwhile are still to be read, so their age means nothing.
  """

  def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
    self._monotonic, self._lock = monotonic, threading.Lock()
    self._read, self._seconds = monotonic(), 0.0

  def __call__(self) -> float:
    with self._lock:
      now = self._monotonic()
      self._seconds += min(now - self._read, _MOST_LATE_SECONDS)
      self._read = now
      return self._seconds


class Pulse:
  """Times since the last sign of life, and times of computations. The limit of both is max(hang_seconds, 3 x the 99th
  percentile of the time of a step, or for computations of a round of local steps). A first computation also loads
  programs and reads the first data: its limit is at least 3 x the longest first computation of the run so far, because
  the members that started the run have shown what it takes."""

  def __init__(
    self, clock: Callable[[], float], *, hang_seconds: float, start_seconds: float, local_steps: int = 1
  ) -> None:
    """start_seconds: the limit for a step while the run's speed is not known, and the longest that a first computation
    can get. local_steps: of a round."""
    self._clock, self._hang_seconds, self._local_steps = clock, hang_seconds, local_steps
    self._start_seconds = start_seconds * local_steps
    self._start_silence = min(max(start_seconds, hang_seconds), _START_SILENCE_SECONDS)
    self._beats: dict[int, dict[int, tuple[float, str]]] = {}  # member: lane: (time, what it does besides steps)
    self._computed: dict[int, tuple[float, float]] = {}  # of the round: member: (time of the report, seconds)
    self._proven: set[int] = set()  # members that have computed a round: all their programs are loaded
    self._longest_first = 0.0  # seconds of the longest first computation
    self._busy_until: dict[int, float] = {}  # when each member was last busy with something besides steps
    self._round_began = 0.0
    self._steps: deque[float] = deque(maxlen=_STEPS)

  def beat(self, member: int, lane: int, busy: str = "") -> None:
    """This process of `member` lives. busy: what it does besides steps."""
    self._beats.setdefault(member, {})[lane] = self._clock(), busy
    if busy:
      self._busy_until[member] = self._clock()

  def forget(self, member: int) -> None:
    self._beats.pop(member, None)
    self._computed.pop(member, None)
    self._proven.discard(member)
    self._busy_until.pop(member, None)

  def begin_epoch(self) -> None:
    """The round under way starts again, perhaps with other members."""
    self._computed = {}
    self._round_began = self._clock()

  def computed(self, member: int, seconds: float) -> None:
    """`member` has computed its shares of the round under way."""
    if member not in self._proven:
      self._proven.add(member)
      self._longest_first = max(self._longest_first, self._clock() - self._since(member, self._round_began))
    self._computed.setdefault(member, (self._clock(), seconds))

  def committed(self, *, is_step: bool) -> dict[str, float]:
    """The round is committed. Returns {member: seconds of its data and computation}."""
    now = self._clock()
    seconds = {str(member): round(took, 6) for member, (_, took) in sorted(self._computed.items())}
    if is_step:
      self._steps.append(now - self._round_began)
    self._computed, self._round_began = {}, now
    return seconds

  def _since(self, member: int, moment: float) -> float:
    """`moment`, or when the member had done what it did besides steps, if that was later."""
    return max(moment, self._busy_until.get(member, moment))

  def limit(self, steps: int) -> float:
    """The longest computation of a member that has computed before, for so many of the steps of a round."""
    if not self._steps:
      return self._start_seconds
    ordered = sorted(self._steps)
    return max(self._hang_seconds, _FACTOR * ordered[int(0.99 * (len(ordered) - 1))] * steps / self._local_steps)

  def late(self) -> list[tuple[int, int, float]]:
    """(member, lane, seconds) of processes that are late with a sign of life: they are busy, or their host is dead."""
    now = self._clock()
    return [
      (member, lane, now - at)
      for member, lanes in self._beats.items()
      for lane, (at, _) in lanes.items()
      if now - at > _LATE_SECONDS
    ]

  def silent(self, members: Collection[int], starting: Collection[int]) -> Iterator[tuple[int, str, float]]:
    """(member, reason, seconds) of members of which a process has given no sign of life for so long.
    starting: members that still import or compile."""
    now, of_ready = self._clock(), self.limit(1) if self._steps else self._start_silence
    for member in sorted(members):
      limit = self._start_silence if member in starting else of_ready
      seconds = max((now - at for at, _ in self._beats.get(member, {}).values()), default=0.0)
      if seconds > limit:
        yield member, f"no sign of life for {seconds:.1f} s", seconds

  def stuck(self, active: Collection[int]) -> list[tuple[int, str, float]]:
    """(member, reason, seconds) of members that have held up the round under way for so long.

    The time counts from the first member that had computed, and from the end of a save."""
    if not self._computed:
      return []
    now, usual = self._clock(), self.limit(self._local_steps)
    first = min(when for when, _ in self._computed.values())
    found = []
    for member in sorted(set(active) - self._computed.keys()):
      busy = next((busy for _, busy in self._beats.get(member, {}).values() if busy), "")
      limit = _BUSY_SECONDS if busy else usual
      if member not in self._proven:
        limit = max(limit, min(_FACTOR * self._longest_first, self._start_seconds))
      seconds = now - (first if busy else self._since(member, first))
      if seconds > limit:
        what = busy or "computing the step"
        found.append((member, f"still {what} {seconds:.1f} s after it could begin", seconds))
    return found

  def stands_still(self, active: Collection[int]) -> float:
    """Seconds since all active members have computed and none does anything besides steps, if the exchange takes too
    long although they live; else 0."""
    if not self._computed.keys() >= set(active):
      return 0.0
    ready = (self._since(member, when) for member, (when, _) in self._computed.items())
    seconds = self._clock() - max(ready, default=self._clock())
    return seconds if seconds > self.limit(self._local_steps) + _LATER_SECONDS else 0.0
