"""Boxes: index ranges ((start, stop), ...), one pair per dim, of the part of an array that a device holds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import Device

from trainer.config.errors import ConfigError

Box = tuple[tuple[int, int], ...]


def of_devices(x: Any) -> dict[Device, Box]:
  """{device: the box that it holds} of an array or a ShapeDtypeStruct with sharding."""
  return {
    device: tuple(part.indices(size)[:2] for part, size in zip(index, x.shape))
    for device, index in x.sharding.devices_indices_map(tuple(x.shape)).items()
  }


def is_local(device: Device) -> bool:
  """Whether this process can read the device's shards. JAX's own process index answers this in any world."""
  return device.process_index == jax.process_index()


def shape(box: Box) -> tuple[int, ...]:
  return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
  return math.prod(shape(box))


def owners(name: str, x: Any, devices: Sequence[Device]) -> dict[Box, Device]:
  """{box: the first of `devices` that holds it}: one full copy of x (an array or ShapeDtypeStruct with sharding).

  Raises ConfigError if the devices together do not hold the whole array.
  """
  held = of_devices(x)
  found: dict[Box, Device] = {}
  for device in devices:
    if device in held:
      found.setdefault(held[device], device)
  if sum(map(volume, found)) != math.prod(x.shape):
    raise ConfigError(
      f"{name} {list(x.shape)} is sharded across slices ({x.sharding}), so that no slice holds a full copy: emergency "
      "checkpoints and snapshots need one. Set dcn_fsdp_parallelism to 1"
    )
  return found


def complete(sizes: Sequence[int], held: Iterable[Box]) -> set[Box]:
  """Boxes among `held` that make up a whole array of this shape without overlap; empty if there are no such boxes."""
  return covering(tuple((0, size) for size in sizes), held)


def covering(box: Box, held: Iterable[Box]) -> set[Box]:
  """Boxes among `held` that together cover `box` without overlapping each other; empty if there are no such boxes."""
  # A sharding cuts an array into boxes of equal shape; boxes of different meshes must not mix.
  grids: dict[tuple[int, ...], set[Box]] = {}
  for other in held:
    grids.setdefault(shape(other), set()).add(other)
  for grid in grids.values():
    touching = {other: volume(common) for other in grid if (common := overlap(box, other)) is not None}
    if sum(touching.values()) == volume(box) and (touching or volume(box) == 0):
      return set(touching) or grid
  return set()


def overlap(a: Box, b: Box) -> Box | None:
  """The common part of two boxes, or None."""
  common = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b))
  return common if all(start < stop for start, stop in common) else None


def inside(box: Box, origin: Box) -> tuple[slice, ...]:
  """Slices that select `box` in an array with the content of the box `origin`."""
  return tuple(slice(start - base[0], stop - base[0]) for (start, stop), base in zip(box, origin))


def assemble(box: Box, parts: Mapping[Box, np.ndarray], dtype: Any) -> np.ndarray:
  """A new array with the content of `box`, copied from `parts`, which cover it without overlap."""
  result = np.empty(shape(box), dtype)
  filled = 0
  for held, data in parts.items():
    if (common := overlap(box, held)) is not None:
      result[inside(common, box)] = data[inside(common, held)]
      filled += volume(common)
  assert filled == result.size, f"{list(parts)} do not cover {box}"
  return result


def host_copy(array: jax.Array, device: Device) -> np.ndarray:
  """A host copy of the shard of `array` on a local device. It stays valid when `array` is donated."""
  shard = next(s for s in array.addressable_shards if s.device == device)
  # On the CPU np.asarray returns the device's buffer itself, which the next step overwrites.
  return np.array(shard.data) if device.platform == "cpu" else np.asarray(shard.data)
