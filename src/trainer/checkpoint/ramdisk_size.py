"""The size of the ramdisk that the emergency tier needs on each host."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from jax import Device

from trainer.checkpoint.arrays import boxes, state_tree
from trainer.checkpoint.emergency import ALIGNMENT, COPIES

# The guide's rule: 4 bytes each of weight and two moments, two copies, and a margin.
BYTES_PER_PARAMETER = 12
MARGIN = 1.15


def ramdisk_by_rule(parameters: int, hosts: int) -> int:
  """Bytes per host by the rule of thumb: parameters x 12 / hosts of a slice x 2 copies x 1.15."""
  return math.ceil(parameters * BYTES_PER_PARAMETER / hosts * COPIES * MARGIN)


def ramdisk_exact(abstract: Any, devices: Sequence[Device], host_of: Callable[[Device], int]) -> dict[int, int]:
  """{host: bytes} of the array data that the hosts of one slice keep: COPIES saves, without a margin.

  abstract: the state with its shardings; devices: of the slice; host_of: usually their process_index. Raises
  ConfigError where the slice does not hold a full copy.
  """
  sizes = {host_of(device): 0 for device in devices}
  for name, x in state_tree.flatten(abstract).items():
    for box, device in boxes.owners(name, x, devices).items():
      size = boxes.volume(box) * x.dtype.itemsize
      sizes[host_of(device)] += -(-size // ALIGNMENT) * ALIGNMENT * COPIES
  return sizes
