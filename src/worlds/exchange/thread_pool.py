"""What an exchange keeps from one sum to the next: a few threads, for all peers, and memory for the pieces of peers."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence

import numpy as np

from worlds.exchange.plan import PART

_MOST_PAIRS = 4
_BLOCK_BYTES = 4 * PART  # of float32
_LEAST_BYTES = 1 << 16  # the memory of shorter arrays has no page faults anyway
_MOST_BLOCKS = 32  # kept


def best_streams(members: int) -> int:
  """How many connections to every peer give each pair of threads at least one. Equal on all members."""
  return -(-_MOST_PAIRS // max(1, members - 1))


class _Block(bytearray):
  """Memory that a BufferPool has made. `release` ignores all other memory."""


class BufferPool:
  """Arrays for what peers send. Fresh memory costs a page fault for every 4 KiB. For all threads."""

  def __init__(self) -> None:
    self._free: list[_Block] = []

  def acquire(self, size: int, dtype: np.dtype) -> np.ndarray:
    """Returns an array [size] with undefined content."""
    if not _LEAST_BYTES <= size * dtype.itemsize <= _BLOCK_BYTES:
      return np.empty(size, dtype)
    try:
      block = self._free.pop()
    except IndexError:  # another thread may have taken the last one
      block = _Block(_BLOCK_BYTES)
    return np.frombuffer(block, dtype, size)

  def release(self, array: np.ndarray) -> None:
    """Makes the memory of an array of `acquire` available again; ignores other arrays. Do not use the array then."""
    block = array.base.obj if isinstance(array.base, memoryview) else None
    if isinstance(block, _Block) and len(self._free) < _MOST_BLOCKS:
      self._free.append(block)


class ExchangeThreads:
  """Threads that run functions, and memory for them. For one caller.

  pairs: how many threads should receive, and how many should send: one for each two CPUs, at most 4.
  """

  def __init__(self) -> None:
    self.pairs = max(1, min(_MOST_PAIRS, (os.cpu_count() or 1) // 2))
    self.memory = BufferPool()
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
