"""Checksums of arrays that do not depend on how the arrays are sharded, computed where the arrays are.

Orbax keeps no checksum of array data: it restores a flipped bit without an error. A fingerprint is computed on the
devices before the copy to the host and again after a restore. So it covers this copy, the disk, the way back and the
resharding.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from trainer.checkpoint.arrays import state_tree

# Knuth's multiplicative hash constant (2**32 / golden ratio) gives neighbouring elements very different weights.
GOLDEN = 2654435761
_BLOCK = 1 << 20  # words that numpy reads at once


def _words(x: jax.Array) -> jax.Array:
  """The bits of x as uint32, one word per element (two for 8-byte types, in a new last dimension)."""
  if x.dtype == jnp.bool_:
    return x.astype(jnp.uint32)
  unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[x.dtype.itemsize]
  return jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)


def _fingerprint(x: jax.Array) -> jax.Array:
  """uint32 [3]: sum of the words; sum of the words weighted by position; number of elements that are not finite."""
  words = _words(x)
  position = jnp.zeros((), jnp.uint32)
  for dim, size in enumerate(words.shape):
    position = position * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, words.shape, dim)
  # Odd, so that no bit of a word is lost in the product.
  weight = (position * jnp.uint32(GOLDEN)) | jnp.uint32(1)
  bad = jnp.zeros(words.shape, jnp.uint32)
  if jnp.issubdtype(x.dtype, jnp.floating):
    odd = (~jnp.isfinite(x)).astype(jnp.uint32)
    bad = odd if odd.ndim == words.ndim else jnp.stack([odd, jnp.zeros_like(odd)], axis=-1)
  # One reduction for all three values: XLA computes them in one pass. With three sums XLA materializes each operand, on
  # the CPU three times the size of the array.
  zero = jnp.uint32(0)
  operands, dims = (words, words * weight, bad), tuple(range(words.ndim))
  return jnp.stack(jax.lax.reduce(operands, (zero, zero, zero), _add, dims))


def _add(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
  return tuple(x + y for x, y in zip(a, b))


@dataclass(frozen=True)
class Started:
  """Fingerprints under way: row i of `values` (uint32 [n, 3], replicated over the mesh) is of the array names[i]."""

  names: tuple[str, ...]
  values: jax.Array | np.ndarray


@functools.lru_cache(maxsize=256)
def _program(kinds: tuple[tuple[tuple[int, ...], Any, Sharding], ...]) -> Any:
  """The compiled fingerprints of arrays of these shapes, dtypes and shardings: one program with one result for all.

  With a program per array, each program in flight on several CPU devices would hold threads of XLA's pool while it
  waits for the other devices, and with a hundred arrays no thread would be left to end the waiting. A result per array
  would be a hundred requests to a Pathways proxy.
  """
  abstract = tuple(jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype, sharding in kinds)
  meshes = [sharding.mesh for _, _, sharding in kinds if isinstance(sharding, NamedSharding)]
  replicated = NamedSharding(meshes[0], PartitionSpec()) if meshes else None
  return (
    jax.jit(lambda arrays: jnp.stack([*map(_fingerprint, arrays)]), out_shardings=replicated).lower(abstract).compile()
  )


def _program_for(arrays: Mapping[str, Any]) -> Any:
  """The program for the arrays (or ShapeDtypeStructs) in the order of their names."""
  ordered = [arrays[name] for name in sorted(arrays)]
  return _program(tuple((tuple(x.shape), x.dtype, x.sharding) for x in ordered))


def prepare(abstract: Any) -> None:
  """Compiles what `dispatch` will need for a state of these shapes, dtypes and shardings. From any thread."""
  _program_for(state_tree.flatten(abstract))


def dispatch(arrays: Mapping[str, jax.Array]) -> Started:
  """Starts the fingerprints of `arrays` and returns at once; the arrays may be donated right after."""
  names = tuple(sorted(arrays))
  if not names:
    return Started((), np.zeros((0, 3), np.uint32))
  return Started(names, _program_for(arrays)(tuple(arrays[name] for name in names)))


def collect(started: Started) -> tuple[dict[str, str], list[str]]:
  """({name: 16 hex digits}, names with non-finite values) of what `dispatch` returned. Waits for the devices."""
  values = np.asarray(started.values)
  prints = {name: _hex(v) for name, v in zip(started.names, values)}
  return prints, [name for name, v in zip(started.names, values) if v[2]]


def of_host_array(array: np.ndarray) -> str:
  """The fingerprint of an array, 16 hex digits as `collect` returns, computed by numpy: no device is touched."""
  size = array.dtype.itemsize
  unsigned = np.uint8 if array.dtype == np.bool_ else np.dtype(f"u{min(size, 4)}")
  words = np.ascontiguousarray(array).reshape(-1).view(unsigned)
  sums = np.zeros(2, np.uint32)
  for first in range(0, len(words), _BLOCK):
    block = words[first : first + _BLOCK].astype(np.uint32)
    weight = np.arange(first, first + len(block), dtype=np.uint64).astype(np.uint32) * np.uint32(GOLDEN) | np.uint32(1)
    sums += np.array([block.sum(dtype=np.uint32), (block * weight).sum(dtype=np.uint32)])
  return _hex(sums)


def _hex(sums: np.ndarray) -> str:
  return f"{int(sums[0]):08x}{int(sums[1]):08x}"
