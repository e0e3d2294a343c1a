from __future__ import annotations


class Clock:
  """A clock that only `sleep` moves, so that waits take no time."""

  def __init__(self):
    self.now = 0.0

  def __call__(self):
    return self.now

  def sleep(self, seconds):
    self.now += seconds
