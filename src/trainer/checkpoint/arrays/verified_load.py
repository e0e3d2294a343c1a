"""Loads a state from stored arrays: converts layers, bounds memory and checks fingerprints, for every backup."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from trainer.checkpoint.arrays import fingerprint, layer_layout, state_tree
from trainer.checkpoint.errors import Rejected
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
  limit = max(state_tree.state_bytes(abstract) // 8, MIN_BATCH_BYTES)
  result: dict[str, jax.Array] = {}
  for batch in layer_layout.batches(layer_layout.plan(saved, wanted), wanted, limit):
    targets: dict[str, Any] = {}
    for move in batch:
      targets.update(layer_layout.stored(move, saved, wanted))
    arrays = together(world, lambda targets=targets: dict(read(targets)))  # type: ignore[misc]
    expected = {name: saved[name]["fingerprint"] for name in targets if "fingerprint" in saved[name]}
    prints, _ = fingerprint.collect(fingerprint.dispatch({name: arrays[name] for name in expected}))
    if wrong := [name for name, value in prints.items() if value != expected[name]]:
      raise Rejected(f"{wrong[0]} does not have the fingerprint it was saved with ({len(wrong)} such arrays)")
    for move in batch:
      result.update(layer_layout.convert(move, arrays, wanted))
    del arrays  # before the next batch is read
  return state_tree.unflatten(abstract, result)
