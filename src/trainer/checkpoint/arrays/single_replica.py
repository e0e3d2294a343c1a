"""enable_single_replica_ckpt_restoring: the devices of one replica read, and send the arrays to all others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from trainer.checkpoint.arrays import boxes, broadcast
from trainer.checkpoint.arrays.verified_load import Read
from trainer.checkpoint.together import together
from trainer.parallel.mesh import DATA
from trainer.world import World


def _on_first_replica(x: Any) -> jax.ShapeDtypeStruct:
  """The array x on the part of its mesh with the first replica: index 0 on the axis `data`."""
  mesh = x.sharding.mesh
  first = Mesh(np.take(mesh.devices, [0], axis=mesh.axis_names.index(DATA)), mesh.axis_names)
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(first, x.sharding.spec))


def read(world: World, read_arrays: Read, targets: Mapping[str, Any]) -> dict[str, jax.Array]:
  """What `read_arrays(targets)` gives on every device, read by the first replica only. A collective.

  Every process raises the Rejected or CheckpointError that one of them raises. Arrays sharded over `data` have no
  replicas and are read by all.
  """
  replicated = {name: x for name, x in targets.items() if DATA in broadcast.spare_axes(x.sharding)}
  wanted = {name: _on_first_replica(x) if name in replicated else x for name, x in targets.items()}
  mine = {name: x for name, x in wanted.items() if x.sharding.addressable_devices}
  arrays = together(world, lambda: dict(read_arrays(mine)))
  for name, target in replicated.items():
    parts = {}
    if (source := arrays.pop(name, None)) is not None:
      shards = {shard.device: shard.data for shard in source.addressable_shards}
      givers = boxes.owners(name, source, list(source.sharding.mesh.devices.flat)).values()
      parts = {device: np.asarray(shards[device]) for device in givers if device in shards}
    # One at a time: the stack of words is as large as the array itself.
    arrays[name] = jax.block_until_ready(broadcast.shards(target, parts))
  return arrays
