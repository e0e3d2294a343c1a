"""Flips bits of arrays, as a fault to rehearse: what a chip that computes wrongly, or its memory, does."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax import Device

from trainer.config.errors import ConfigError
from trainer.config.faults import Fault, RandomFaults

X = TypeVar("X")
Flatten = Callable[[Any], Mapping[str, Any]]  # {name: array} of a tree, in tree order


class Flips:
  """The faults of one kind that hit one slice now."""

  def __init__(self, faults: Sequence[Fault], flatten: Flatten, devices: Collection[Device] | None = None) -> None:
    """devices: in whose memory bits flip. None: all of this process."""
    self._faults, self._flatten, self._devices = faults, flatten, devices
    self._hit: set[Hashable] = set()

  def __call__(self, tree: X, what: Hashable = None) -> X:
    """Returns `tree` with one bit of one array flipped for each fault. Only sticky faults hit the same `what` twice."""
    for fault in self._faults:
      if fault.sticky or what not in self._hit:
        tree = self._flipped(tree, fault)
    self._hit.add(what)
    return tree

  def _flipped(self, tree: X, fault: Fault) -> X:
    """Returns `tree` with one flipped bit, in the memory of one of the devices. The fault decides which one."""
    chance, devices = random.Random(str(fault)), self._devices
    arrays = dict(self._flatten(tree))
    if not (found := _found(arrays, fault)):  # a part of the gradients, for example
      return tree
    name = chance.choice(found)
    array = arrays[name]
    shards = [shard.data for shard in array.addressable_shards]
    at = chance.choice([i for i, shard in enumerate(shards) if devices is None or shard.devices() <= set(devices)])
    values = np.array(shards[at])
    bits = values.reshape(-1).view(f"uint{8 * values.itemsize}")
    place = chance.randrange(bits.size)
    bit = fault.bit if fault.bit >= 0 else chance.randrange(32)
    bits[place] ^= bits.dtype.type(1 << bit % (8 * values.itemsize))
    (device,) = shards[at].devices()
    shards[at] = jax.device_put(bits.view(values.dtype).reshape(values.shape), device)
    arrays[name] = jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)
    return jax.tree.unflatten(jax.tree.structure(tree), [*arrays.values()])


def check(faults: Sequence[Fault | RandomFaults], params: Mapping[str, Any], opt_state: Mapping[str, Any]) -> None:
  """Raises ConfigError for a fault whose array does not exist. params, opt_state: {name: array}, perhaps abstract."""
  for fault in faults:
    if isinstance(fault, Fault) and fault.is_flip:
      arrays = opt_state if fault.kind == "flip_optimizer" else params
      if not _found(arrays, fault):
        names = ", ".join(sorted(arrays))
        raise ConfigError(f"fault_injection={fault}: no array has {fault.array} in its name.\nUse one of {names}.")


def _found(arrays: Mapping[str, Any], fault: Fault) -> list[str]:
  """The names of the arrays that the fault may hit."""
  return [name for name, array in arrays.items() if fault.array in name and array.size]
