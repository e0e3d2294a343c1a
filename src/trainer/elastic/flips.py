"""Flips bits of arrays, as a fault to rehearse: what a chip that computes wrongly, or its memory, does."""

from __future__ import annotations

import random
from collections.abc import Collection, Hashable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax import Device

from trainer.config.errors import ConfigError
from trainer.config.faults import Fault, RandomFaults

X = TypeVar("X")


class Flips:
  """The faults of one kind that hit one slice now."""

  def __init__(self, faults: Sequence[Fault], devices: Collection[Device] | None = None) -> None:
    """devices: in whose memory bits flip. None: all of this process."""
    self._faults, self._devices = faults, devices
    self._hit: set[Hashable] = set()

  def __call__(self, tree: X, what: Hashable = None) -> X:
    """Returns `tree` with one bit of one array flipped for each fault. Only sticky faults hit the same `what` twice."""
    for fault in self._faults:
      if fault.sticky or what not in self._hit:
        tree = _flipped(tree, fault, self._devices)
    self._hit.add(what)
    return tree


def check(faults: Sequence[Fault | RandomFaults], params: Any, opt_state: Any) -> None:
  """Raises ConfigError for a fault whose array does not exist. params, opt_state: arrays or ShapeDtypeStructs."""
  for fault in faults:
    if isinstance(fault, Fault) and fault.is_flip:
      tree = opt_state if fault.kind == "flip_optimizer" else params
      if not _found(tree, fault):
        names = ", ".join(sorted(_names(tree)))
        raise ConfigError(f"fault_injection={fault}: no array has {fault.array} in its name.\nUse one of {names}.")


def _names(tree: Any) -> list[str]:
  paths, _ = jax.tree_util.tree_flatten_with_path(tree)
  return [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths]


def _found(tree: Any, fault: Fault) -> list[int]:
  """The indices of the leaves that the fault may hit."""
  sizes = [leaf.size for leaf in jax.tree.leaves(tree)]
  return [index for index, name in enumerate(_names(tree)) if fault.array in name and sizes[index]]


def _flipped(tree: X, fault: Fault, devices: Collection[Device] | None) -> X:
  """Returns `tree` with one flipped bit, in the memory of one of the devices. The fault decides which one."""
  chance = random.Random(str(fault))
  leaves, structure = jax.tree.flatten(tree)
  if not (found := _found(tree, fault)):  # a part of the gradients, for example
    return tree
  index = chance.choice(found)
  shards = [shard.data for shard in leaves[index].addressable_shards]
  at = chance.choice([i for i, shard in enumerate(shards) if devices is None or shard.devices() <= set(devices)])
  values = np.array(shards[at])
  bits = values.reshape(-1).view(f"uint{8 * values.itemsize}")
  place = chance.randrange(bits.size)
  bit = fault.bit if fault.bit >= 0 else chance.randrange(32)
  bits[place] ^= bits.dtype.type(1 << bit % (8 * values.itemsize))
  (device,) = shards[at].devices()
  shards[at] = jax.device_put(bits.view(values.dtype).reshape(values.shape), device)
  leaves[index] = jax.make_array_from_single_device_arrays(leaves[index].shape, leaves[index].sharding, shards)
  return jax.tree.unflatten(structure, leaves)
