"""Writes a checkpoint of arrays that are made one after the other, so that few of them are in memory."""

from __future__ import annotations

import asyncio
import collections
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from input_pipeline.places import Place
from trainer.checkpoint import s3, step_folders
from trainer.checkpoint.arrays import fingerprint, state_tree
from trainer.checkpoint.errors import Rejected
from trainer.weights.array_parts import BLOCK

_AT_ONCE = 4  # arrays that are written at the same time


@dataclass(frozen=True)
class Lazy:
  """An array that `make` returns."""

  shape: tuple[int, ...]
  dtype: np.dtype
  make: Callable[[], np.ndarray]

  @property
  def size(self) -> int:
    return math.prod(self.shape)

  @property
  def nbytes(self) -> int:
    return self.size * self.dtype.itemsize


def write(folder: Place, arrays: Mapping[str, Lazy], meta: Mapping[str, Any], done: Callable[[str], object]) -> None:
  """Writes the checkpoint `folder`. meta: JSON, without "arrays". done: called with each name.

  An array is made while those before it are written, if all together are no larger than the largest. Does not wait
  until the files are on the disk. Raises OSError if the storage fails, and Rejected, which names the array, if a value
  is not finite.
  """
  import orbax.checkpoint as ocp
  import tensorstore
  from orbax.checkpoint import type_handlers

  s3.teach_orbax()
  described = state_tree.describe(arrays)

  class Handler(type_handlers.NumpyHandler):
    def typestr(self) -> str:
      return "jax.Array"

    async def serialize(self, values: Sequence[Lazy], infos: Sequence[Any], args: Any = None) -> list[Any]:
      # Orbax's own context would wait for the disk after each array.
      context = tensorstore.Context({"file_io_sync": False}, infos[0].ts_context)
      largest = max(value.nbytes for value in values)
      writing: collections.deque[tuple[asyncio.Future[None], int]] = collections.deque()  # and the bytes of each
      try:
        for i, (value, info) in enumerate(zip(values, infos, strict=True)):
          while writing and (len(writing) == _AT_ONCE or sum(size for _, size in writing) + value.nbytes > largest):
            await writing[0][0]
            writing.popleft()
          array, described[info.name]["fingerprint"] = await asyncio.to_thread(_make, info.name, value)
          info.ts_context = context
          task = asyncio.ensure_future(self._write(array, info, args[i] if args else ocp.SaveArgs()))
          writing.append((task, value.nbytes))
          del array  # `task` has the only reference
        await asyncio.gather(*(task for task, _ in writing))
      finally:
        await asyncio.gather(*(task for task, _ in writing), return_exceptions=True)
      return []

    async def _write(self, array: np.ndarray, info: Any, args: Any) -> None:
      await self._background_serialize([array], [info], [args])
      done(info.name)

  registry = type_handlers.create_type_handler_registry(
    (Lazy, Handler()),
    (jax.Array, type_handlers.ArrayHandler()),  # without it Orbax warns
  )
  state = ocp.PyTreeCheckpointHandler(use_zarr3=True, use_compression=False, type_handler_registry=registry)
  # A folder that Orbax makes in the background would be made over arrays that are written already.
  at_once = ocp.AsyncOptions(create_directories_asynchronously=False)
  options = ocp.CompositeOptions(async_options=at_once)
  try:
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler(composite_options=options, state=state)) as writer:
      writer.save(folder, args=ocp.args.Composite(state=ocp.args.PyTreeSave(dict(arrays))))
  except (OSError, Rejected):
    raise
  except Exception as error:  # tensorstore reports a full disk as ValueError
    raise OSError(f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
  step_folders.seal(folder, {**meta, "metric": None, "arrays": described})


def _make(name: str, lazy: Lazy) -> tuple[np.ndarray, str]:
  array = np.ascontiguousarray(lazy.make())
  assert array.shape == lazy.shape and array.dtype == lazy.dtype, name
  found, flat, step = fingerprint.Blocks(), array.reshape(-1), BLOCK // array.itemsize
  for first in range(0, flat.size, step):
    found.add(flat[first : first + step], first)
  if not found.is_finite:
    raise Rejected(f"{name} has values that are not finite")
  return array, found.value
