"""When to try again, after which pause, and when to grow: counted against progress, on a clock given from outside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

_LONGEST_BACKOFF_SECONDS = 60.0


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
  cost_seconds: float = 0.0  # of the last recovery, from its event to the next completed step

  def resized(self) -> None:
    """The number of slices has changed, down or up."""
    self.last_resize = self.clock()

  def worth_it(self, steps_left: int, step_seconds: float, throughput_now: float, throughput_then: float) -> bool:
    """True when the interval has passed and the steps left get faster by more than the resize costs.

    Throughputs are relative to the full topology (batch_plan); step_seconds is what a step takes now.
    """
    if self.clock() - self.last_resize < self.min_interval_seconds:
      return False
    gain = steps_left * step_seconds * (1 - throughput_now / throughput_then)
    return gain > self.cost_seconds
