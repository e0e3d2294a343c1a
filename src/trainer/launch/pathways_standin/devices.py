"""The devices of the stand-in: forced CPU devices of this process, grouped into slices.

A shard is an array of JAX on one device. Device ids of the protocol are the ids of these devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax._src.sharding_impls import GSPMDSharding
from jax.sharding import SingleDeviceSharding
from jaxlib import _hlo, _jax, lapack

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
    self._single: dict[tuple[int, str], SingleDeviceSharding] = {}
    self._replicated: dict[tuple[tuple[int, ...], str], GSPMDSharding] = {}

  def slice_of(self, device: int) -> int:
    """The slice of a device."""
    return device // self.per_slice

  def put(self, value: np.ndarray | jax.Array, device: int, memory: str) -> jax.Array:
    """A shard with a copy of the value."""
    key = (device, memory)
    if key not in self._single:
      self._single[key] = SingleDeviceSharding(self.all[device], memory_kind=memory)
    return jax.device_put(value, self._single[key], may_alias=False)

  def join(self, shards: Sequence[jax.Array], devices: tuple[int, ...], memory: str) -> Any:
    """One argument of an executable from its shards.

    The array claims to be replicated, with the shape of a shard: PjRt looks at the buffers only, so no arithmetic of
    shardings is needed.
    """
    if len(shards) == 1:
      return shards[0]
    key = (devices, memory)
    if key not in self._replicated:
      chosen = tuple(self.all[device] for device in devices)
      self._replicated[key] = GSPMDSharding.get_replicated(chosen, memory_kind=memory)
    return _jax.ArrayImpl(shards[0].aval, self._replicated[key], list(shards), committed=True, _skip_checks=True)

  def index_map(self, op_sharding: bytes, devices: tuple[int, ...], shape: tuple[int, ...]) -> list[tuple[slice, ...]]:
    """For each device, the part of an array of this shape that an OpSharding (serialized) puts on it."""
    op = _hlo.OpSharding()
    op.ParseFromString(op_sharding)
    chosen = tuple(self.all[device] for device in devices)
    indices = GSPMDSharding(chosen, op).devices_indices_map(shape)
    return [indices[device] for device in chosen]
