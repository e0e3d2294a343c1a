"""What the slices of a witness compare: the bits of the sums of a share, and of the state."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding

from trainer.checkpoint.arrays import state_tree
from trainer.program import state
from trainer.program.share_sums import Scalars, ShareSums
from trainer.program.state import TrainState
from worlds.exchange import Part
from worlds.membership.witness import Sums

Digests = tuple[Scalars, Sequence[jax.Array]]  # of a share, perhaps not computed yet


class Checks:
  """The compiled digests of one slice. `of_` starts the digests of a share or of the whole state; `read_` and `number`
  wait for them."""

  SCALARS = ("loss", "z_loss", "weight")  # of a share

  def __init__(self, sums: ShareSums, abstract: TrainState, replicated: NamedSharding) -> None:
    """abstract: ShapeDtypeStructs with shardings. replicated: on the slice."""
    of_tree = jax.jit(state.digest, out_shardings=replicated)
    trees = {id(part.tree): part.tree for part in sums.parts}  # stages of layers share one
    compiled = {key: of_tree.lower(tree).compile() for key, tree in trees.items()}
    self._of_parts = [compiled[id(part.tree)] for part in sums.parts]
    self._of_state = of_tree.lower(abstract).compile()
    rows = lambda part: f", from layer {part.first}" if part.first else ""
    self._names = [name + rows(part) for part in sums.parts for name in state_tree.flatten(part.tree)]
    self._state_names = list(state_tree.flatten(abstract))

  def of_share(self, scalars: Scalars, parts: Sequence[Part]) -> Digests:
    return scalars, [digest(part.tree) for digest, part in zip(self._of_parts, parts, strict=True)]

  def read_share(self, digests: Digests) -> Sums:
    scalars, arrays = digests
    bits = zip(self.SCALARS, np.asarray(scalars, np.float32).view(np.uint32).tolist(), strict=True)
    sums = np.concatenate([_of_all_devices(array) for array in arrays]).tolist()
    return {name: [number, number.bit_count()] for name, number in bits} | dict(zip(self._names, sums, strict=True))

  def of_state(self, state: TrainState) -> jax.Array:
    return self._of_state(state)

  def number(self, digests: jax.Array) -> int:
    return zlib.crc32(_of_all_devices(digests).tobytes())

  def read_state(self, digests: jax.Array) -> Sums:
    return dict(zip(self._state_names, _of_all_devices(digests).tolist(), strict=True))


def _of_all_devices(replicated: jax.Array) -> np.ndarray:
  """For each array, a checksum of its digests on all devices of this process, and their mean number of bits that are
  1: uint32 [arrays, 2]. The digests of devices may differ: each adds its own copy of a replicated array."""
  copies = np.stack([np.asarray(shard.data) for shard in replicated.addressable_shards], axis=1)
  checksums = [zlib.crc32(of_array.tobytes()) for of_array in copies]
  return np.stack([checksums, copies[..., 1].sum(axis=1, dtype=np.uint64) // copies.shape[1]], axis=1).astype(np.uint32)
