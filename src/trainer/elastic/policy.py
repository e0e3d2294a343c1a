"""When to retry and after which pause, when to resize, when to take a snapshot. The caller supplies the clock."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

_FIRST_BACKOFF_SECONDS, _LONGEST_BACKOFF_SECONDS = 1.0, 60.0
_SMALL_STATE_BYTES = 16 * 2**20  # copied in milliseconds, so a snapshot of every step costs little
_FIRST_PERIOD = 4  # until the cost of a snapshot is known: two of four steps are not affected by a snapshot
_FEWEST_SAMPLES, _SAMPLES = 3, 25
_PAUSE_EVERY, _PAUSE = 64, 4  # steps; the first of the four still follows a snapshot


@dataclass
class RetryPolicy:
  """Counts attempts since the last progress. Progress is a step that no earlier attempt has completed."""

  max_attempts: int
  reset_steps: int
  backoff_seconds: float = _FIRST_BACKOFF_SECONDS  # the first pause; doubles with each attempt without a new step
  attempt: int = 1
  furthest_step: int = 0
  new_steps: int = 0  # of the current attempt
  idle_attempts: int = 0  # in a row, without a new step

  def completed(self, step: int) -> None:
    if step <= self.furthest_step:
      return
    self.furthest_step = step
    self.new_steps += 1
    self.idle_attempts = 0
    if self.new_steps >= self.reset_steps:
      self.attempt = 1

  def start_at(self, step: int) -> None:
    """The process resumes after `step`, which an earlier process has completed."""
    self.furthest_step = max(self.furthest_step, step)

  def failed(self) -> float | None:
    """Returns the seconds to pause before the next attempt; None: the attempts are used up."""
    if self.attempt >= self.max_attempts:
      return None
    pause = 0.0
    if self.new_steps == 0:
      pause = min(self.backoff_seconds * 2.0 ** min(self.idle_attempts, 30), _LONGEST_BACKOFF_SECONDS)
      self.idle_attempts += 1
    self.attempt += 1
    self.new_steps = 0
    return pause

  def resized(self) -> None:
    """The attempt ended in good order, to continue with more slices. This does not use up an attempt."""
    self.new_steps = 0


@dataclass
class ResizePolicy:
  """Decides whether to use a returned slice now."""

  min_interval_seconds: float
  clock: Callable[[], float]
  last_resize: float = field(default=-float("inf"))
  # Of the last recovery, from the moment the event was detected to the next completed step, without waiting for slices
  # and compiling: a resize costs as much. How long a hang went unnoticed says nothing about a resize.
  cost_seconds: float = 0.0

  def recovered(self, cost: float) -> None:
    """A recovery took `cost` seconds, see `cost_seconds`."""
    self.cost_seconds = cost

  def resized(self) -> None:
    self.last_resize = self.clock()

  @property
  def interval_over(self) -> bool:
    """Whether min_interval_seconds have passed since the last resize."""
    return self.clock() - self.last_resize >= self.min_interval_seconds

  def worthwhile(self, saved_seconds: float, compile_seconds: float) -> bool:
    """Whether a resize saves more of the rest of the run than the resize and its compilation cost."""
    return saved_seconds > self.cost_seconds + compile_seconds


class SnapshotPolicy:
  """Decides at which steps a snapshot is taken: at every `period`-th step.

  period=0 chooses the period: 1 for a small state; otherwise the shortest period at which snapshots cost at most
  `max_overhead` of the step time, measured by comparing step times. A timer around the dispatch of a copy would not
  show how much the copy slows down the step that runs at the same time: the snapshot's own step if the copy waits for
  its arrays, otherwise the next step. Noise makes the period longer, never shorter: the policy uses an upper estimate.
  """

  def __init__(self, period: int, max_overhead: float, state_bytes: int) -> None:
    """state_bytes: size of one full copy of the state."""
    if period == 0 and state_bytes <= _SMALL_STATE_BYTES:
      period = 1
    self.is_fixed, self._max_overhead = period > 0, max_overhead
    self.period = period or _FIRST_PERIOD
    self._taken: deque[int] = deque(maxlen=4)
    self.restarted()

  def restarted(self) -> None:
    """Another attempt begins. Drops the measured step times: they may be from other slices."""
    self._taken.clear()  # some of these steps may be repeated
    self._own: deque[float] = deque(maxlen=_SAMPLES)  # seconds of steps with a snapshot
    self._next: deque[float] = deque(maxlen=_SAMPLES)  # of steps that follow a step with a snapshot
    self._both: deque[float] = deque(maxlen=_SAMPLES)  # of steps that are both; at period 1 all steps are
    self._others: deque[float] = deque(maxlen=4 * _SAMPLES)

  def due(self, step: int) -> bool:
    if not self.is_fixed and self.period < 3 and step % _PAUSE_EVERY < _PAUSE:
      return False  # with no pause every step would be affected by a snapshot, and no step could be compared
    if self.is_fixed or not self._taken:
      return step % self.period == 0
    return step - self._taken[-1] >= self.period  # later by as many steps as the copy before it takes too long

  def taken(self, step: int) -> None:
    self._taken.append(step)

  def completed(self, step: int, seconds: float) -> None:
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
    if (period == 1) != (self.period == 1):  # the samples of the new period are old
      for samples in (self._own, self._next, self._both):
        samples.clear()
    self.period = period
