"""A pytree of float32 arrays as one flat host buffer, and back: the shards of this process, each once.

Slices with equal meshes have equal layouts, also when a slice has several processes: process p of each slice has the
same shards in the same order.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

_Box = tuple[tuple[int, int], ...]
_ALIGNED = 16  # elements: 64 bytes, which XLA on a CPU needs to use memory of NumPy without a copy


@dataclasses.dataclass(frozen=True)
class _Leaf:
  """One array. boxes: {index range of a shard: its offset in the flat buffer}. held: {local device: its shard}."""

  shape: tuple[int, ...]
  sharding: Sharding
  boxes: dict[_Box, int]
  held: dict[jax.Device, _Box]


class FlatLayout:
  """Where the shards of a pytree are in a flat float32 buffer [size]: in the order of the tree and of their indices.

  Shards whose size is a multiple of 64 bytes come before all others, so that they are aligned.
  abstract: a pytree of float32 arrays or ShapeDtypeStructs with shardings. A replicated shard is stored once.
  """

  def __init__(self, abstract: Any) -> None:
    leaves, self._tree = jax.tree.flatten(abstract)
    self._leaves: list[_Leaf] = []
    for leaf in leaves:
      assert leaf.dtype == np.float32, f"{leaf.dtype}{list(leaf.shape)}: sums are float32"
      indices = leaf.sharding.addressable_devices_indices_map(leaf.shape)
      held = {
        device: tuple(part.indices(size)[:2] for part, size in zip(index, leaf.shape))
        for device, index in indices.items()
      }
      self._leaves.append(_Leaf(leaf.shape, leaf.sharding, dict.fromkeys(sorted(set(held.values())), 0), held))
    shards = [(leaf.boxes, box, math.prod(_shape(box))) for leaf in self._leaves for box in leaf.boxes]
    self.size = 0
    for boxes, box, size in sorted(shards, key=lambda shard: shard[2] % _ALIGNED > 0):
      boxes[box] = self.size
      self.size += size

  def empty(self) -> np.ndarray:
    """Returns a buffer [size] whose first element is aligned, with undefined content."""
    raw = np.empty(self.size + _ALIGNED, np.float32)
    start = -(raw.ctypes.data // raw.itemsize) % _ALIGNED
    return raw[start : start + self.size]

  def to_host(self, tree: Any) -> HostCopy:
    """Starts the copies of all shards of `tree` to the host, and returns the values for `Exchange.reduce`.

    Do not donate the arrays of `tree` while the copy is in use: on a CPU the copy is the memory of the arrays.
    """
    parts: list[tuple[int, Any]] = []
    for leaf, array in zip(self._leaves, self._tree.flatten_up_to(tree), strict=True):
      assert array.sharding.is_equivalent_to(leaf.sharding, len(leaf.shape)), f"{array.sharding}, not {leaf.sharding}"
      shards = {leaf.held[shard.device]: shard.data for shard in array.addressable_shards}
      parts += [(offset, shards[box]) for box, offset in leaf.boxes.items() if shards[box].size]
    parts.sort(key=lambda part: part[0])
    for _, shard in parts:
      shard.copy_to_host_async()
    return HostCopy(parts, self.size)

  def to_device(self, flat: np.ndarray) -> Any:
    """Returns the pytree of arrays, sharded like `abstract`, with the values of `flat`.

    On a CPU the arrays may share the memory of `flat`. Write to `flat` again only after every computation that reads
    the arrays is complete, and do not donate them.
    """
    assert flat.shape == (self.size,) and flat.dtype == np.float32, f"{flat.dtype}{list(flat.shape)}, F = {self.size}"
    views, devices = [], []
    for leaf in self._leaves:
      for device, box in leaf.held.items():
        start, shape = leaf.boxes[box], _shape(box)
        views.append(flat[start : start + math.prod(shape)].reshape(shape))
        devices.append(device)
    placed = iter(jax.device_put(views, devices))
    arrays = [
      jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, [next(placed) for _ in leaf.held])
      for leaf in self._leaves
    ]
    return self._tree.unflatten(arrays)


class HostCopy:
  """The values of a FlatLayout on their way to the host: the HostData of `Exchange.reduce`.

  It keeps the values after they were read, so that a reduction can be repeated, and drops its references to the device
  arrays.
  """

  def __init__(self, parts: list[tuple[int, Any]], size: int) -> None:
    self.size = size
    self._offsets = [offset for offset, _ in parts]
    self._parts = [part for _, part in parts]

  def read(self, start: int, stop: int) -> np.ndarray:
    """Returns the float32 values [start, stop), after waiting for them: a view if one shard holds all of them."""
    first = bisect.bisect_right(self._offsets, start) - 1
    found = []
    for index in range(first, len(self._parts)):
      offset = self._offsets[index]
      if offset >= stop:
        break
      found.append(self._values(index)[max(0, start - offset) : stop - offset])
    return found[0] if len(found) == 1 else np.concatenate(found)

  def _values(self, index: int) -> np.ndarray:
    part = self._parts[index]
    if not isinstance(part, np.ndarray):
      part = self._parts[index] = np.asarray(part).reshape(-1)
    return part


def _shape(box: _Box) -> tuple[int, ...]:
  return tuple(stop - start for start, stop in box)
