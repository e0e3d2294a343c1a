"""Makes shards and runs programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax._src.sharding_impls import GSPMDSharding
from jax.sharding import SingleDeviceSharding
from jaxlib import _jax

from pathways_standin.arrays import Array, Shard
from pathways_standin.devices import Devices
from pathways_standin.executables import Executable


class Runtime:
  """Shards are arrays of JAX in this process. A lost slice is only marked as lost."""

  def __init__(self, devices: Devices) -> None:
    self.devices = devices
    self._single: dict[tuple[int, str], SingleDeviceSharding] = {}
    self._replicated: dict[tuple[tuple[int, ...], str], GSPMDSharding] = {}

  def put(self, value: Any, device: int, memory: str) -> Shard:
    """A shard with a copy of the value: a NumPy array, or another shard."""
    key = (device, memory)
    if key not in self._single:
      self._single[key] = SingleDeviceSharding(self.devices.all[device], memory_kind=memory)
    return jax.device_put(value, self._single[key], may_alias=False)

  def run(self, executable: Executable, arguments: Sequence[Array], kept: frozenset[int]) -> list[list[Shard]]:
    """Dispatches a program. Returns the shards of each result; they may not be ready yet.

    kept: arguments that the program donates but the caller keeps.
    """
    joined = []
    for i, array in enumerate(arguments):
      if i in kept and i in executable.donated:
        copies = [self.put(shard, d, array.memory) for shard, d in zip(array.shards, array.devices, strict=True)]
        joined.append(self._join(copies, array.devices, array.memory))
        continue
      if array.joined is None:
        array.joined = self._join(array.shards, array.devices, array.memory)
      joined.append(array.joined)
    results = executable.loaded.execute_sharded(joined)
    return results.disassemble_into_single_device_arrays() if executable.outputs else []

  def _join(self, shards: Sequence[Any], devices: tuple[int, ...], memory: str) -> Any:
    if len(shards) == 1:
      return shards[0]
    key = (devices, memory)
    if key not in self._replicated:
      chosen = tuple(self.devices.all[device] for device in devices)
      self._replicated[key] = GSPMDSharding.get_replicated(chosen, memory_kind=memory)
    return join_shards(shards, self._replicated[key])


def join_shards(shards: Sequence[Any], sharding: GSPMDSharding) -> Any:
  """An array of the shards that this process has.

  It claims to be replicated, with the shape of a shard: PjRt looks at the buffers only, so no arithmetic of shardings
  is needed.
  """
  return _jax.ArrayImpl(shards[0].aval, sharding, list(shards), committed=True, _skip_checks=True)
