"""Arrays out of parts that lie on different hosts: taken locally, from replicas, or as a last resort from anywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Device

from trainer.checkpoint import boxes, broadcast
from trainer.checkpoint.boxes import Box


def gather(
  name: str, target: Any, held: Mapping[Box, np.ndarray], table: Sequence[Mapping[str, set[Box]]]
) -> jax.Array:
  """One array of the target's sharding out of what this host and the others hold (`table`: boxes per process).

  All processes come to the same decisions, because all decide from the table.
  """
  dtype = jnp.dtype(target.dtype)
  known = [set(told.get(name, set())) for told in table]
  wanted = boxes.of_devices(target.sharding, target.shape)
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
      raw = broadcast.to_all_hosts(raw, boxes.volume(box) * dtype.itemsize, source)
      parts[box] = raw.view(dtype).reshape([stop - start for start, stop in box])
      for found in known:
        found.add(box)
  able = {device: boxes.covering(box, known[device.process_index]) for device, box in wanted.items()}
  if all(able.values()):
    givers = list(wanted)
  else:  # of the devices with the same box the first that can gives, the others receive
    givers = [next(d for d in _holders(wanted, box) if able[d]) for box in dict.fromkeys(wanted.values())]
  data = {
    device: boxes.assemble(wanted[device], {box: parts[box] for box in able[device]}, dtype)
    for device in givers
    if device.process_index == jax.process_index()
  }
  if not all(able.values()):
    return broadcast.share(target, data)
  placed = [jax.device_put(x, device) for device, x in data.items()]
  return jax.make_array_from_single_device_arrays(tuple(target.shape), target.sharding, placed)


def _holders(wanted: Mapping[Device, Box], box: Box) -> list[Device]:
  return [device for device, held in wanted.items() if held == box]
