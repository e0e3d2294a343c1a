"""A state as the buffers of this process's shards, in an order that every slice shares: for a copy to another slice."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trainer.checkpoint.arrays import boxes, state_tree
from trainer.checkpoint.arrays.boxes import Box


def local_parts(state: Any) -> list[np.ndarray]:
  """The distinct shards of `state` on this process, on the host. They may share memory with the state."""
  found = []
  for x in state_tree.flatten(state).values():
    shards = {shard.device: shard.data for shard in x.addressable_shards}
    found += [np.asarray(shards[device]) for device in _owners(x).values()]
  return found


def empty_parts(abstract: Any) -> list[np.ndarray]:
  """Buffers that `local_parts` of another slice's state fit into."""
  arrays = state_tree.flatten(abstract).values()
  return [np.empty(boxes.shape(box), jnp.dtype(x.dtype)) for x in arrays for box in _owners(x)]


def assemble(abstract: Any, parts: list[np.ndarray]) -> Any:
  """The state with the shapes, types and shardings of `abstract` from the buffers of `empty_parts`, now filled."""
  rest = iter(parts)
  arrays: dict[str, jax.Array] = {}
  for name, x in state_tree.flatten(abstract).items():
    held = {box: next(rest) for box in _owners(x)}
    shards = [
      # A copy: on the CPU the array would be the buffer itself, with no alignment that XLA may rely on.
      jax.device_put(held[box].copy(), device)
      for device, box in boxes.of_devices(x).items()
      if boxes.is_local(device)
    ]
    arrays[name] = jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)
  return state_tree.unflatten(abstract, arrays)


def _owners(x: Any) -> dict[Box, jax.Device]:
  """{box: the first local device that holds it}."""
  found: dict[Box, jax.Device] = {}
  for device, box in boxes.of_devices(x).items():
    if boxes.is_local(device):
      found.setdefault(box, device)
  return found
