"""The devices of the stand-in: forced CPU devices of this process, grouped into slices.

A shard is an array of JAX on one device. Device ids of the protocol are the ids of these devices.
"""

from __future__ import annotations

import jax
from jax._src.sharding_impls import GSPMDSharding
from jaxlib import _hlo, lapack

MEMORY_KINDS = ("device", "pinned_host", "unpinned_host")
DEFAULT_MEMORY = MEMORY_KINDS[0]


class Devices:
  """All devices: slice s has the devices s * per_slice to (s + 1) * per_slice - 1."""

  def __init__(self, slices: int, per_slice: int, kind: str) -> None:
    """Makes the devices. Call it once, before anything else of JAX is used in this process.

    kind: the `device_kind` that clients see.
    """
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", slices * per_slice)
    jax.config.update("jax_enable_x64", True)  # the client decides about types
    jax.config.update("jax_enable_compilation_cache", False)
    lapack._lapack.initialize()  # usually lowering does this, and the client lowers; without it SVD crashes
    self.slices, self.per_slice, self.kind = slices, per_slice, kind
    self.all = tuple(jax.devices())
    assert [device.id for device in self.all] == list(range(slices * per_slice))
    self.client = self.all[0].client

  def slice_of(self, device: int) -> int:
    return device // self.per_slice

  def index_map(self, op_sharding: bytes, devices: tuple[int, ...], shape: tuple[int, ...]) -> list[tuple[slice, ...]]:
    """For each device, the part of an array of this shape that an OpSharding (serialized) puts on it."""
    op = _hlo.OpSharding()
    op.ParseFromString(op_sharding)
    chosen = tuple(self.all[device] for device in devices)
    indices = GSPMDSharding(chosen, op).devices_indices_map(shape)
    return [indices[device] for device in chosen]
