"""What the slices of a witness compare: the bits of the sums of a share, and of the state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from trainer.program import state
from trainer.program.share_sums import Scalars, ShareSums
from trainer.program.state import TrainState
from worlds.exchange import Part
from worlds.membership.witness import Sums

Digests = tuple[Scalars, Sequence[jax.Array]]  # of a share, perhaps not computed yet
_SCALARS = ("loss", "z_loss", "weight")


class Checks:
  """The compiled digests of one slice."""

  def __init__(self, sums: ShareSums, abstract: TrainState, replicated: NamedSharding) -> None:
    """abstract: ShapeDtypeStructs with shardings. replicated: on the slice."""
    of_tree = jax.jit(state.digest, out_shardings=replicated)
    trees = {id(part.tree): part.tree for part in sums.parts}  # stages of layers share one
    compiled = {key: of_tree.lower(tree).compile() for key, tree in trees.items()}
    self._of_parts = [compiled[id(part.tree)] for part in sums.parts]
    self._of_state = of_tree.lower(abstract).compile()
    rows = lambda part: f", from layer {part.first}" if part.first else ""
    self._names = [name + rows(part) for part in sums.parts for name in names(part.tree)]
    self._state_names = names(abstract)

  def of_share(self, scalars: Scalars, parts: Sequence[Part]) -> Digests:
    """Starts the digests of a share."""
    return scalars, [digest(part.tree) for digest, part in zip(self._of_parts, parts, strict=True)]

  def read_share(self, digests: Digests) -> Sums:
    """Waits for the digests of a share."""
    scalars, arrays = digests
    bits = zip(_SCALARS, np.asarray(scalars, np.float32).view(np.uint32).tolist(), strict=True)
    sums = np.concatenate([_of_all_devices(array) for array in arrays]).tolist()
    return {name: [number, number.bit_count()] for name, number in bits} | dict(zip(self._names, sums, strict=True))

  def of_state(self, state: TrainState) -> jax.Array:
    """Starts the digests of the whole state."""
    return self._of_state(state)

  def number(self, digests: jax.Array) -> int:
    """Waits for the digests of the whole state, and returns their sum."""
    return int(_of_all_devices(digests).sum(dtype=np.uint32))

  def read_state(self, digests: jax.Array) -> Sums:
    """Waits for the digests of the whole state."""
    return dict(zip(self._state_names, _of_all_devices(digests).tolist(), strict=True))


def names(tree: Any) -> list[str]:
  """The names of the arrays of a tree: "layers.attention.query"."""
  paths, _ = jax.tree_util.tree_flatten_with_path(tree)
  return [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths]


def _of_all_devices(replicated: jax.Array) -> np.ndarray:
  """The sum, modulo 2^32, of what the devices of this process hold of a replicated array. They may differ: each device
  adds its own copy of an array that is replicated within the slice."""
  return np.sum([np.asarray(shard.data) for shard in replicated.addressable_shards], axis=0, dtype=np.uint32)
