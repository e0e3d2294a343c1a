"""Assembles arrays from parts that lie on different hosts: local parts first, then replicas, then any host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Device

from trainer.checkpoint.arrays import boxes, broadcast
from trainer.checkpoint.arrays.boxes import Box
from trainer.world import World


def assemble(
  world: World, name: str, target: Any, held: Mapping[Box, np.ndarray], table: Sequence[Mapping[str, set[Box]]]
) -> jax.Array:
  """One array with the target's sharding, made of the parts on this host (`held`) and on others (`table`, per rank).

  All processes decide from the same table, so all come to the same decisions. A device's process_index is used as a
  rank: this works only where all processes share one JAX world.
  """
  dtype = jnp.dtype(target.dtype)
  known = [set(boxes_of.get(name, set())) for boxes_of in table]
  wanted = boxes.of_devices(target)
  parts = dict(held)
  orphans = {
    box
    for box in wanted.values()
    if not any(boxes.covering(box, known[d.process_index]) for d in _holders(wanted, box))
  }
  for box in sorted(boxes.complete(target.shape, set().union(*known))):
    if any(boxes.overlap(box, orphan) is not None for orphan in orphans):
      source = next(process for process, found in enumerate(known) if box in found)
      raw = parts[box].reshape(-1).view(np.uint8) if box in parts else None
      raw = broadcast.to_all_hosts(world, raw, boxes.volume(box) * dtype.itemsize, source)
      parts[box] = raw.view(dtype).reshape(boxes.shape(box))
      for found in known:
        found.add(box)
  able = {device: boxes.covering(box, known[device.process_index]) for device, box in wanted.items()}
  if all(able.values()):
    givers = list(wanted)
  else:  # for each box the first device that has it sends, the others receive
    givers = [next(d for d in _holders(wanted, box) if able[d]) for box in dict.fromkeys(wanted.values())]
  data = {
    device: boxes.assemble(wanted[device], {box: parts[box] for box in able[device]}, dtype)
    for device in givers
    if boxes.is_local(device)
  }
  if not all(able.values()):
    return broadcast.shards(target, data)
  placed = [jax.device_put(x, device) for device, x in data.items()]
  return jax.make_array_from_single_device_arrays(tuple(target.shape), target.sharding, placed)


def _holders(wanted: Mapping[Device, Box], box: Box) -> list[Device]:
  return [device for device, held in wanted.items() if held == box]
