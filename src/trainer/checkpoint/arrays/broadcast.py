"""Sends shards from the hosts that hold them to the hosts that need them, bit for bit.

Sums unsigned words; only one summand is not zero. (Summing the values themselves, as Orbax does, changes -0.0 into 0.0
and int8 into int32.)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Device
from jax.sharding import NamedSharding, PartitionSpec

from trainer.world import World

# Words of the same size as the elements. The sum of one word and zeros is the word itself.
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
PIECE_BYTES = 64 << 20


def spare_axes(sharding: NamedSharding) -> tuple[str, ...]:
  """The mesh axes along which the array is replicated."""
  used: set[str] = set()
  for entry in sharding.spec:
    used.update((entry,) if isinstance(entry, str) else entry or ())
  return tuple(name for name in sharding.mesh.axis_names if name not in used)


def shards(target: Any, parts: Mapping[Device, np.ndarray]) -> jax.Array:
  """An array with target's shape, type and NamedSharding. All processes of its mesh must call.

  parts: {local device: content of its shard}. For every shard exactly one device must be given, over all processes.
  """
  sharding, dtype = target.sharding, np.dtype(target.dtype)
  spare, word = spare_axes(sharding), UNSIGNED[dtype.itemsize]
  copies = math.prod(sharding.mesh.shape[axis] for axis in spare)
  spread = NamedSharding(sharding.mesh, PartitionSpec(spare, *sharding.spec))
  shape = (copies, *target.shape)
  local = spread.shard_shape(shape)
  buffers = []
  for device in spread.addressable_devices:
    data = parts[device].view(word).reshape(local) if device in parts else np.zeros(local, word)
    buffers.append(jax.device_put(data, device))
  return _merge(jax.make_array_from_single_device_arrays(shape, spread, buffers), dtype, sharding)


# One function for all calls, so that arrays of equal shape, type and sharding share a compiled program.
@functools.partial(jax.jit, static_argnums=(1, 2), donate_argnums=0)
def _merge(words: jax.Array, dtype: np.dtype[Any], sharding: NamedSharding) -> jax.Array:
  """Returns the sum of `words` [copies, ...] as an array of `dtype`."""
  words = jnp.sum(words, axis=0, dtype=words.dtype)
  values = words != 0 if dtype == jnp.bool_ else jax.lax.bitcast_convert_type(words, dtype)
  return jax.lax.with_sharding_constraint(values, sharding)


def to_all_hosts(world: World, data: np.ndarray | None, size: int, source: int) -> np.ndarray:
  """The `size` bytes (uint8) that rank `source` holds, on every process. Every process must call."""
  if world.size == 1:
    assert data is not None
    return data
  from jax.experimental import multihost_utils

  result = np.empty(size, np.uint8)
  for start in range(0, size, PIECE_BYTES):
    stop = min(start + PIECE_BYTES, size)
    piece = data[start:stop] if data is not None else np.zeros(stop - start, np.uint8)
    result[start:stop] = np.asarray(multihost_utils.broadcast_one_to_all(piece, is_source=world.rank == source))
  return result
