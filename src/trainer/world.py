"""The processes of a run, and what they agree on: who is primary, and values gathered from all.

Components receive a World. They never ask JAX for a process index: when each slice is its own JAX world, JAX's index
says nothing about the run, and every slice would write the same checkpoint.
"""

from __future__ import annotations

import json
from typing import Any, Protocol

_SHORT = 60  # bytes of a value that processes gather at once; longer ones take a second time


class World(Protocol):
  """All processes of one run. Every process calls `gather` in the same order."""

  rank: int  # of this process, 0 to size - 1
  size: int  # number of processes

  @property
  def is_primary(self) -> bool:
    """Whether this process writes the files that exist once per run: log, metrics, events, lock."""

  def gather(self, value: Any) -> list[Any]:
    """The JSON values of all processes, in rank order; on every process."""

  def stop_agreed(self, requested: bool, asked: int) -> bool:
    """Whether all processes must stop after this step: the same answer on all of them. requested: whether this process
    was asked to stop. asked: how often the processes have asked, this time included."""


class SingleWorld:
  rank = 0
  size = 1
  is_primary = True

  def gather(self, value: Any) -> list[Any]:
    return [value]

  def stop_agreed(self, requested: bool, asked: int) -> bool:
    return requested


SINGLE_WORLD = SingleWorld()  # it has no state: every run of one process may share it


class JaxWorld:
  """A run whose processes are joined by jax.distributed: one JAX world."""

  def __init__(self) -> None:
    import jax  # slow: `--help` and tools.report import this module and need no JAX

    self.rank = jax.process_index()
    self.size = jax.process_count()
    self.is_primary = self.rank == 0

  def gather(self, value: Any) -> list[Any]:
    import numpy as np  # slow, as above
    from jax.experimental import multihost_utils

    data = np.frombuffer(json.dumps(value).encode(), np.uint8)

    def rows(size: int) -> np.ndarray:
      """Of each process the number of bytes, in four of them, and its first bytes: uint8 [processes, 4 + size]."""
      row = np.zeros(4 + size, np.uint8)
      row[:4] = np.frombuffer(data.size.to_bytes(4, "little"), np.uint8)
      row[4 : 4 + data.size] = data[:size]
      return np.asarray(multihost_utils.process_allgather(row)).reshape(self.size, -1)

    found = rows(_SHORT)
    sizes = [int.from_bytes(row[:4].tobytes(), "little") for row in found]
    if max(sizes) > _SHORT:
      found = rows(max(sizes))
    return [json.loads(row[4 : 4 + size].tobytes()) for row, size in zip(found, sizes)]

  def stop_agreed(self, requested: bool, asked: int) -> bool:
    from jax.experimental import multihost_utils

    return bool(multihost_utils.reached_preemption_sync_point(asked))  # JAX knows who was asked to stop


def of_jax() -> World:
  """The world that JAX was started with: JaxWorld with several processes, else SingleWorld."""
  import jax

  return JaxWorld() if jax.process_count() > 1 else SINGLE_WORLD


def from_primary(world: World, value: Any) -> Any:
  """The primary's JSON value, on every process; the other processes' values are ignored."""
  values = world.gather([world.is_primary, value if world.is_primary else None])
  return next(value for primary, value in values if primary)
