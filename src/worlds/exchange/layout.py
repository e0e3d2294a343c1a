"""A pytree of float32 arrays as one flat host buffer, and back: the shards of this process, each once.

Slices with equal meshes have equal layouts, also when a slice has several processes: process p of each slice has the
same shards in the same order.

JAX is imported where it is used, so that members whose arrays are NumPy's start without it.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
  import jax
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


class Part(NamedTuple):
  """Some arrays of a pytree, or some rows of them. tree: nested as the whole tree, without the keys that it has no
  arrays of; arrays, or ShapeDtypeStructs with shardings. first: the index of their first row in the whole arrays."""

  tree: Any
  first: int = 0


class FlatLayout:
  """Where the shards of a pytree are in a flat float32 buffer [size]: in the order of the tree and of their indices.

  Shards whose size is a multiple of 64 bytes come before all others, so that they are aligned.
  abstract: a pytree of float32 arrays or ShapeDtypeStructs with shardings. A replicated shard is stored once.
  """

  def __init__(self, abstract: Any) -> None:
    import jax

    paths, self._tree = jax.tree_util.tree_flatten_with_path(abstract)
    self._leaves: list[_Leaf] = []
    for _, leaf in paths:
      assert leaf.dtype == np.float32, f"{leaf.dtype}{list(leaf.shape)}: sums are float32"
      indices = leaf.sharding.addressable_devices_indices_map(leaf.shape)
      held = {
        device: tuple(part.indices(size)[:2] for part, size in zip(index, leaf.shape))
        for device, index in indices.items()
      }
      self._leaves.append(_Leaf(leaf.shape, leaf.sharding, dict.fromkeys(sorted(set(held.values())), 0), held))
    self._by_path = {path: leaf for (path, _), leaf in zip(paths, self._leaves)}
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

  def ranges(self, parts: Sequence[Part]) -> list[tuple[int, int]]:
    """Returns where the values of `parts` are in the flat buffer, [start, stop) of each shard, in the order of the
    parts: `known` of `Exchange.reduce`."""
    places = [place for part in parts for _, places in self._places(part) for place in places.values()]
    return [(start, start + size) for start, size in places]

  def to_host(self, parts: Sequence[Part]) -> HostCopy:
    """Starts the copies of all shards of `parts` to the host, and returns the values for `Exchange.reduce`. parts: in
    the order in which they are computed; together they have every value once. Do not donate their arrays while the copy
    is in use, which on a CPU is their memory."""
    copied: list[tuple[int, Any]] = []
    for part in parts:
      for array, places in self._places(part):
        shards = {shard.device: shard.data for shard in array.addressable_shards}
        copied += [(start, shards[device]) for device, (start, size) in places.items() if size]
    for _, shard in copied:
      shard.copy_to_host_async()
    copied.sort(key=lambda one: one[0])
    assert sum(shard.size for _, shard in copied) == self.size, f"not the {self.size} values of the layout"
    return HostCopy(copied, self.size)

  def _places(self, part: Part) -> Iterator[tuple[Any, dict[jax.Device, tuple[int, int]]]]:
    """Yields each array with {device: (offset in the flat buffer, size) of its shard}, a replicated shard once."""
    import jax

    for path, array in jax.tree_util.tree_flatten_with_path(part.tree)[0]:
      leaf = self._by_path[path]
      assert array.sharding.is_equivalent_to(leaf.sharding, len(leaf.shape)), f"{array.sharding}, not {leaf.sharding}"
      shard = array.sharding.shard_shape(array.shape)
      is_whole = array.shape == leaf.shape
      assert is_whole or (shard[0], *leaf.shape[1:]) == array.shape, f"{array.shape} are not whole rows of {leaf.shape}"
      offset = part.first * math.prod(shard[1:])
      devices = {box: device for device, box in leaf.held.items()}  # one of those that hold the box
      yield array, {device: (leaf.boxes[box] + offset, math.prod(shard)) for box, device in devices.items()}

  def to_device(self, flat: np.ndarray) -> Any:
    """Returns the pytree of arrays, sharded like `abstract`, with the values of `flat`. On a CPU the arrays may share
    its memory: write to `flat` again only when every computation that reads them is complete, and do not donate
    them."""
    import jax

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
  """The values of a FlatLayout on their way to the host, for `Exchange.reduce`. Keeps the values after they were read,
  so that a reduction can be repeated, and drops its references to the device arrays."""

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

  def wait(self) -> None:
    """Returns when all values are computed. Any thread may call it."""
    for part in self._parts:  # `read` replaces entries meanwhile
      if not isinstance(part, np.ndarray):
        part.block_until_ready()

  def _values(self, index: int) -> np.ndarray:
    part = self._parts[index]
    if not isinstance(part, np.ndarray):
      part = self._parts[index] = np.asarray(part).reshape(-1)
    return part


def _shape(box: _Box) -> tuple[int, ...]:
  return tuple(stop - start for start, stop in box)
