"""Loads a state from stored arrays: bounds memory and checks fingerprints, for every backup."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from trainer.checkpoint.arrays import fingerprint, state_tree
from trainer.checkpoint.checkpoint_errors import Rejected
from trainer.checkpoint.together import together
from trainer.world import World

# A restore may hold this much in addition to the state, or an eighth of the state if that is more.
MIN_BATCH_BYTES = 64 << 20
_M_MMAP_THRESHOLD = -3  # malloc.h
_BLOCK = 1 << 20
# glibc raises the threshold to the size of each freed block, up to this value.
_USUAL = 32 << 20

Read = Callable[[Mapping[str, Any]], Mapping[str, jax.Array]]


@contextlib.contextmanager
def _returning_freed_memory() -> Iterator[None]:
  """Makes malloc return freed memory to the system at once: blocks of 1 MiB and more are mapped one by one, and
  unmapped when freed.

  Otherwise glibc keeps the read buffers of a restore in fragments: a third of the size of the state, measured. Does
  nothing without glibc (macOS, musl).
  """
  libc = ctypes.CDLL(None)
  if not hasattr(libc, "mallopt"):
    yield
    return
  libc.mallopt(_M_MMAP_THRESHOLD, _BLOCK)
  try:
    yield
  finally:
    libc.mallopt(_M_MMAP_THRESHOLD, _USUAL)
    libc.malloc_trim(0)


@_returning_freed_memory()
def load(world: World, read: Read, saved: Mapping[str, Any], abstract: Any) -> Any:
  """The state of abstract's structure, shapes, types and shardings; a collective: what one process raises all raise.

  read: gives the arrays for {name: ShapeDtypeStruct with sharding} in their stored shapes and types. saved: {name:
  {"shape", "dtype", "fingerprint"}}, without a fingerprint where nothing is known of the values. Raises Rejected where
  they do not fit or are not what was saved.
  """
  wanted = state_tree.flatten(abstract)
  _check(saved, wanted)
  result: dict[str, jax.Array] = {}
  unchanged: dict[str, str] = {}  # {array that is as it was saved: its fingerprint}
  for batch in _batches(wanted, max(state_tree.state_bytes(abstract) // 8, MIN_BATCH_BYTES)):
    dtypes = {name: jnp.dtype(saved[name]["dtype"]) for name in batch}
    targets = {name: jax.ShapeDtypeStruct(x.shape, dtypes[name], sharding=x.sharding) for name, x in batch.items()}
    arrays = together(world, lambda targets=targets: dict(read(targets)))  # type: ignore[misc]
    expected = {name: saved[name]["fingerprint"] for name in targets if "fingerprint" in saved[name]}
    unchanged |= {name: value for name, value in expected.items() if dtypes[name] == batch[name].dtype}
    _compare({name: (arrays[name], value) for name, value in expected.items() if name not in unchanged})
    result |= {name: _cast(arrays[name], x) for name, x in batch.items()}
    del arrays  # before the next batch is read
  # All at once: a recovery must not compile, and this program has been compiled with the step.
  _compare({name: (result[name], value) for name, value in unchanged.items()})
  return state_tree.unflatten(abstract, result)


def _compare(expected: Mapping[str, tuple[jax.Array, str]]) -> None:
  """Raises Rejected unless each array has its fingerprint."""
  prints, _ = fingerprint.collect(fingerprint.dispatch({name: array for name, (array, _) in expected.items()}))
  if wrong := [name for name, value in prints.items() if value != expected[name][1]]:
    raise Rejected(f"{wrong[0]} does not have the fingerprint it was saved with ({len(wrong)} such arrays)")


def _check(saved: Mapping[str, Mapping[str, Any]], wanted: Mapping[str, Any]) -> None:
  """Raises Rejected if an array is missing, left over or has another shape. Types may differ: arrays are cast."""
  for name, x in wanted.items():
    if name not in saved:
      raise Rejected(f"it has no array {name}")
    if tuple(saved[name]["shape"]) != tuple(x.shape):
      raise Rejected(f"{name} has shape {list(saved[name]['shape'])} where the state wants {list(x.shape)}")
  if extra := [name for name in saved if name not in wanted]:
    raise Rejected(f"it has {len(extra)} arrays that the state lacks: {', '.join(extra[:3])}")


def _batches(wanted: Mapping[str, Any], limit: int) -> Iterator[dict[str, Any]]:
  """The arrays in order, in batches of at most `limit` bytes. A larger array is a batch of its own."""
  batch: dict[str, Any] = {}
  left = limit
  for name, x in wanted.items():
    left -= state_tree.state_bytes(x)
    if batch and left < 0:
      yield batch
      batch, left = {}, limit - state_tree.state_bytes(x)
    batch[name] = x
  if batch:
    yield batch


def _cast(array: jax.Array, wanted: Any) -> jax.Array:
  if array.dtype == wanted.dtype:
    return array
  return jax.jit(lambda x: x.astype(wanted.dtype), out_shardings=wanted.sharding)(array)
