"""The threads of an exchange: a few, for all peers, kept from one sum to the next."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence

_MOST_PAIRS = 4


def best_streams(members: int) -> int:
  """How many connections to every peer give each pair of threads at least one. Equal on all members."""
  return -(-_MOST_PAIRS // max(1, members - 1))


class Crew:
  """Threads that run functions. For one caller.

  pairs: how many threads should receive, and how many should send: one for each two CPUs, at most 4.
  """

  def __init__(self) -> None:
    self.pairs = max(1, min(_MOST_PAIRS, (os.cpu_count() or 1) // 2))
    self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
    self._threads: list[threading.Thread] = []

  def start(self, tasks: Sequence[Callable[[], None]]) -> None:
    """Runs all tasks at once, each in a thread of its own, which must raise no error. Call it again when they have
    ended."""
    while len(self._threads) < len(tasks):
      thread = threading.Thread(target=self._work, name=f"exchange-{len(self._threads)}", daemon=True)
      self._threads.append(thread)
      thread.start()
    for task in tasks:
      self._tasks.put(task)

  def close(self) -> None:
    """Ends the threads."""
    for _ in self._threads:
      self._tasks.put(None)
    for thread in self._threads:
      thread.join()
    self._threads.clear()

  def _work(self) -> None:
    while task := self._tasks.get():
      task()
      del task  # and the arrays that it uses
