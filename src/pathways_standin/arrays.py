"""Arrays as clients see them: shards behind a handle."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import jax

from pathways_standin.gates import Gate
from pathways_standin.placement import Spec
from pathways_standin.status import Status

Shard: TypeAlias = "jax.Array | Status"  # a Status: the data are lost, or were never computed

_DELETED = Status("INVALID_ARGUMENT", "Array has been deleted.")


class Array:
  """One shard for each device of a sharding. Changes only under the lock of the slices."""

  __slots__ = ("__weakref__", "deleted", "gates", "joined", "made_by", "shards", "spec")

  def __init__(self, spec: Spec, shards: Sequence[Shard]) -> None:
    self.spec, self.shards = spec, list(shards)
    self.gates: dict[int, Gate] = {}  # slice -> what holds back the data; see gates.py
    self.made_by: frozenset[int] = frozenset()  # numbers of the executions that the data come from directly
    self.deleted = False
    self.joined: Any = None  # what a runtime makes of the shards once; None after they have changed
    assert len(spec.placement.devices) == len(self.shards), spec

  @property
  def devices(self) -> tuple[int, ...]:
    return self.spec.placement.devices

  @property
  def memory(self) -> str:
    return self.spec.placement.memory

  def error(self) -> Status | None:
    """Why the array cannot be used, if it cannot."""
    return _DELETED if self.is_deleted() else self.lost()

  def lost(self) -> Status | None:
    """Why data are lost, if some are. None for a deleted array."""
    return next((shard for shard in self.shards if isinstance(shard, Status)), None)

  def is_deleted(self) -> bool:
    """Whether it was deleted or donated. A shard that another array shares may be donated through that array."""
    if not self.deleted and any(not isinstance(shard, Status) and shard.is_deleted() for shard in self.shards):
      self.delete()
    return self.deleted

  def delete(self) -> None:
    """Frees the data, unless another array or an execution still uses them."""
    self.deleted, self.joined = True, None
    self.shards, self.gates = [], {}

  def lose(self, status: Status, devices: frozenset[int] | None = None) -> int:
    """Replaces the shards on the devices (None: all) by an error. Returns how many were lost."""
    lost = 0
    for i, shard in enumerate(self.shards):
      if not isinstance(shard, Status) and (devices is None or self.devices[i] in devices):
        self.shards[i] = status
        lost += 1
    if lost:
      self.joined = None
    return lost

  def is_computed(self) -> bool:
    """Whether no computation or transfer of its data is under way. True for deleted and lost data."""
    return all(isinstance(shard, Status) or shard.is_deleted() or shard.is_ready() for shard in self.shards)

  def closed_gates(self) -> dict[int, Gate]:
    """The gates that hold back the data now."""
    if self.gates:
      self.gates = {slice_id: gate for slice_id, gate in self.gates.items() if not gate.is_open}
    return self.gates


class Store:
  """The arrays of one session by handle. A handle may hold an error: the array could not be made."""

  def __init__(self) -> None:
    self._arrays: dict[int, Array | Status] = {}
    self._lock = threading.Lock()

  def __len__(self) -> int:
    return len(self._arrays)

  def find(self, handle: int) -> Array:
    """Raises Status for an unknown handle and for an array that could not be made."""
    found = self._arrays.get(handle)
    if found is None:
      raise Status("NOT_FOUND", f"Unknown array handle: {handle}")
    if isinstance(found, Status):
      raise found
    return found

  def find_all(self, handles: Iterable[int]) -> list[Array]:
    """Raises Status if one of them cannot be found."""
    return [self.find(handle) for handle in handles]

  def insert(self, handle: int, array: Array | Status) -> None:
    with self._lock:
      self._arrays[handle] = array

  def erase(self, handles: Iterable[int]) -> None:
    """Forgets arrays. Raises Status if some are unknown; the others are forgotten."""
    with self._lock:
      missing = [handle for handle in handles if self._arrays.pop(handle, None) is None]
    if missing:
      raise Status("NOT_FOUND", f"Unknown array handle(s): {','.join(map(str, missing))}")

  def arrays(self) -> list[Array]:
    """All arrays that could be made."""
    with self._lock:
      return [array for array in self._arrays.values() if isinstance(array, Array)]

  def clear(self) -> None:
    with self._lock:
      self._arrays.clear()
