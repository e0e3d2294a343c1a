"""When to try again, after which pause, when to grow, when to take a snapshot. Clocks are given from outside."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

_LONGEST_BACKOFF_SECONDS = 60.0
_SMALL_STATE_BYTES = 16 * 2**20  # copied in milliseconds: not worth losing more than one step for
_FIRST_PERIOD = 4  # until the cost of a snapshot is known: of four steps two have nothing to do with one
_FEWEST_SAMPLES, _SAMPLES = 3, 25
_PAUSE_EVERY, _PAUSE = 64, 4  # steps; of the four the first still comes after a snapshot


@dataclass
class RetryPolicy:
  """Counts attempts since the last real progress. Progress is a step that no earlier attempt had completed."""

  max_attempts: int
  reset_steps: int
  backoff_seconds: float
  attempt: int = 1
  furthest_step: int = 0
  new_steps: int = 0  # of the current attempt
  idle_attempts: int = 0  # in a row, without a new step

  def completed(self, step: int) -> None:
    """A step was completed by the current attempt."""
    if step <= self.furthest_step:
      return
    self.furthest_step = step
    self.new_steps += 1
    self.idle_attempts = 0
    if self.new_steps >= self.reset_steps:
      self.attempt = 1

  def start_at(self, step: int) -> None:
    """The process begins at a step that an earlier process had completed."""
    self.furthest_step = max(self.furthest_step, step)

  def failed(self) -> float | None:
    """Seconds to pause before the next attempt, or None: no more attempts."""
    if self.attempt >= self.max_attempts:
      return None
    pause = 0.0
    if self.new_steps == 0:
      pause = min(self.backoff_seconds * 2**self.idle_attempts, _LONGEST_BACKOFF_SECONDS)
      self.idle_attempts += 1
    self.attempt += 1
    self.new_steps = 0
    return pause

  def resized(self) -> None:
    """The attempt ended in good order to go on with more slices; that costs no attempt."""
    self.new_steps = 0


@dataclass
class ResizePolicy:
  """Whether a returned slice is taken in now."""

  min_interval_seconds: float
  clock: Callable[[], float]
  last_resize: float = field(default=-float("inf"))
  cost_seconds: float = 0.0  # of the last recovery, from its event to the next completed step, compiling excluded

  def resized(self) -> None:
    """The number of slices has changed, down or up."""
    self.last_resize = self.clock()

  @property
  def interval_over(self) -> bool:
    """Whether the last resize is long enough ago."""
    return self.clock() - self.last_resize >= self.min_interval_seconds

  def worthwhile(self, saved_seconds: float, compile_seconds: float) -> bool:
    """Whether a resize saves more of the rest of the run than the resize and its compilation cost."""
    return saved_seconds > self.cost_seconds + compile_seconds


class SnapshotPolicy:
  """At which steps a snapshot is taken: every `period`-th, or (0) every one of a small state, and of a larger one as
  often as costs at most `max_overhead` of the step time.

  The cost is measured in step times, because a timer around the dispatch of a copy does not show what it takes from the
  step that runs meanwhile: where copies wait for their arrays that is the snapshot's own step, else the one after it.
  Noise makes the period longer, never shorter: what counts is the cost that is probably not exceeded.
  """

  def __init__(self, period: int, max_overhead: float, state_bytes: int) -> None:
    """state_bytes: of one full copy of the state."""
    if period == 0 and state_bytes <= _SMALL_STATE_BYTES:
      period = 1
    self.is_fixed, self._max_overhead = period > 0, max_overhead
    self.period = period or _FIRST_PERIOD
    self._taken: deque[int] = deque(maxlen=4)
    self.restarted()

  def restarted(self) -> None:
    """Another attempt begins: what steps took before, on other slices perhaps, says nothing about those to come."""
    self._own: deque[float] = deque(maxlen=_SAMPLES)  # seconds of steps of which a snapshot was taken
    self._next: deque[float] = deque(maxlen=_SAMPLES)  # of those after them
    self._both: deque[float] = deque(maxlen=_SAMPLES)  # of steps that are both, which all are at period 1
    self._others: deque[float] = deque(maxlen=4 * _SAMPLES)

  def due(self, step: int) -> bool:
    """Whether a snapshot of `step` should be taken."""
    if not self.is_fixed and self.period < 3 and step % _PAUSE_EVERY < _PAUSE:
      return False  # without a pause no step would have nothing to do with a snapshot, and none could be compared
    return step % self.period == 0

  def taken(self, step: int) -> None:
    """A snapshot of `step` has been started."""
    self._taken.append(step)

  def completed(self, step: int, seconds: float) -> None:
    """`step` took `seconds`."""
    if self.is_fixed:
      return
    own_one, after_one = step in self._taken, step - 1 in self._taken
    if own_one and after_one:
      self._both.append(seconds)
    else:
      (self._own if own_one else self._next if after_one else self._others).append(seconds)
    parts = [self._both] if self.period == 1 else [self._own, self._next]
    if min(map(len, (*parts, self._others))) < _FEWEST_SAMPLES:
      return
    usual = statistics.median(self._others)
    cost = sum(map(statistics.median, parts)) - len(parts) * usual
    # A median of n samples has the standard error 1.25 sigma / sqrt(n); sigma is 1.48 times the median deviation.
    sigma = 1.48 * statistics.median(abs(seconds - usual) for seconds in self._others)
    variance = sum(1 / len(part) for part in parts) + len(parts) ** 2 / len(self._others)
    probable = cost + 1.25 * sigma * math.sqrt(variance)
    # A snapshot every `period` steps costs cost / (period * usual) of the time.
    period = max(1, math.ceil(probable / max(self._max_overhead * usual, 1e-9)))
    if (period == 1) != (self.period == 1):  # what is measured from now on was last measured long ago
      for samples in (self._own, self._next, self._both):
        samples.clear()
    self.period = period
