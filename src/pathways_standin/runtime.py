"""Where shards are, and what runs programs: this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax._src.sharding_impls import GSPMDSharding
from jax.sharding import SingleDeviceSharding
from jaxlib import _jax

from pathways_standin.arrays import Array, Shard
from pathways_standin.devices import Devices
from pathways_standin.executables import Executable
from pathways_standin.gates import Gate

Rearrange: TypeAlias = Callable[[list[np.ndarray]], list[np.ndarray]]
Place: TypeAlias = tuple[int, tuple[int, ...]]  # the device of a shard, and its shape


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

  def rearrange(self, shards: Sequence[Any], change: Rearrange, places: Sequence[Place], memory: str) -> list[Shard]:
    """Shards in these places with what `change` makes of the values of other shards."""
    values = change([np.asarray(shard) for shard in shards])
    return [self.put(value, device, memory) for value, (device, _) in zip(values, places, strict=True)]

  def to_host(self, shard: Any) -> Any:
    """The same shard, or a copy in this process that may be on its way. NumPy can convert it."""
    return shard

  def held_back_by(self, shards: Sequence[Any]) -> Gate | None:
    """What opens when the first of these shards that is not ready has become ready; None: a thread must wait."""
    return None

  def prepare(self, executable: Executable, options: bytes) -> None:
    """Gets ready to run a program. options: a serialized CompileOptionsProto."""

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
    """One argument of an executable from its shards."""
    if len(shards) == 1:
      return shards[0]
    key = (devices, memory)
    if key not in self._replicated:
      chosen = tuple(self.devices.all[device] for device in devices)
      self._replicated[key] = GSPMDSharding.get_replicated(chosen, memory_kind=memory)
    return join_shards(shards, self._replicated[key])

  def describe(self, slice_id: int) -> dict[str, Any]:
    """What `status` reports about what computes for a slice."""
    return {}

  def shut_down(self, slice_id: int) -> None:
    """Ends what computes for a slice, if that is a process. Then the slice is down, if it was not before."""

  def start_up(self, slice_id: int) -> None:
    """Starts what computes for a slice, if it does not run, before the slice is used again."""

  def close(self) -> None:
    """Ends the processes of all slices. The server ends now."""

  def runs(self, slice_id: int) -> bool:
    """Whether that runs."""
    return True


def join_shards(shards: Sequence[Any], sharding: GSPMDSharding) -> Any:
  """An array of the shards that this process has.

  It claims to be replicated, with the shape of a shard: PjRt looks at the buffers only, so no arithmetic of shardings
  is needed.
  """
  return _jax.ArrayImpl(shards[0].aval, sharding, list(shards), committed=True, _skip_checks=True)
