"""Arrays of a checkpoint, read one by one, and parts of them, read by ranges of bytes.

A restore reads whole chunks, and a chunk of a run on one device is an array with all layers and all experts.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass
from typing import Any

import numpy as np

from input_pipeline.places import Place
from trainer.checkpoint import checksums, run_id, s3
from trainer.checkpoint.arrays.fingerprint import Blocks
from trainer.checkpoint.errors import Rejected
from trainer.checkpoint.step_folders import MANIFEST, META, StepFolders
from trainer.config.errors import ConfigError
from trainer.weights import tiles
from trainer.world import SINGLE_WORLD

BLOCK = 2 << 20  # bytes that are read at once: to allocate more costs several times as much as to read them
_REMOTE_BLOCK = 32 << 20  # from an object store, where each read is a request
_THREADS = 16  # at most: each holds a block or two


@dataclass(frozen=True)
class Entry:
  """An array that can be read."""

  shape: tuple[int, ...]
  dtype: np.dtype
  read: Callable[[], np.ndarray]


Entries = dict[str, Entry]


def entries(place: str) -> Entries:
  """The arrays of the checkpoint that `place` names. Raises ConfigError, CheckpointError, and Rejected for a checkpoint
  that is damaged."""
  place = os.path.expanduser(place).rstrip("/")
  folder = run_id.folder(place)
  if (folder / META).exists():
    manifest, meta = (checksums.parse(checksums.read(folder / name), name) for name in (MANIFEST, META))
    checksums.check(folder, manifest)
    return of_checkpoint(folder, meta)
  run, named = run_id.split(place)
  step = int(named) if named else None
  folders = StepFolders(f"{run}/checkpoints", SINGLE_WORLD, lambda line: None)
  steps = folders.steps()
  if not steps or step not in (None, *steps):
    there = f"checkpoint {step}; there are {steps}" if steps else "checkpoints"
    raise ConfigError(f"{place}: has no {there}.\nGive RUN_DIR, RUN_DIR@STEP, or the folder of a checkpoint.")
  number = steps[-1] if step is None else step
  return of_checkpoint(folders.directory / str(number), folders.verify(number))


def of_checkpoint(folder: Place, meta: dict[str, Any]) -> Entries:
  """{name: array} of a committed checkpoint."""
  import ml_dtypes  # noqa: F401 -- numpy knows bfloat16 then

  read = lambda name: functools.partial(read_whole, folder, name)
  return {name: Entry(tuple(x["shape"]), np.dtype(x["dtype"]), read(name)) for name, x in meta["arrays"].items()}


def read_whole(folder: Place, name: str) -> np.ndarray:
  """An array of a checkpoint. Raises Rejected if it cannot be read."""
  import tensorstore

  kvstore = {"driver": "ocdbt", "base": _place(folder), "path": f"{name}/"}
  try:
    return tensorstore.open({"driver": "zarr3", "kvstore": kvstore}).result().read().result()
  except ValueError as error:  # tensorstore has no type of its own
    raise Rejected(f"{name} cannot be read: {str(error).splitlines()[0]}") from error


def _place(folder: Place) -> Any:
  """Where tensorstore finds the arrays of a checkpoint."""
  base = f"{folder}/state"
  return s3.kvstore(f"{base}/") if s3.is_s3(base) else f"{base if folder.is_remote else f'file://{base}'}/"


class ArrayParts:
  """The arrays of a checkpoint in the format of `Persistent`: zarr3 in OCDBT, without compression."""

  def __init__(self, folder: Place) -> None:
    import tensorstore

    self._store = tensorstore.KvStore.open({"driver": "ocdbt", "base": _place(folder)}).result()
    self._block = _REMOTE_BLOCK if folder.is_remote else BLOCK
    self._threads = futures.ThreadPoolExecutor(min(os.cpu_count() or 1, _THREADS))  # they end with this object
    self._layouts: dict[str, tuple[list[int], list[int]]] = {}

  def read(self, name: str, index: tuple[int, ...], out: np.ndarray, found: Blocks) -> np.ndarray:
    """Returns `out` with the values at `index`, a number for each of the first dims. Reads no other bytes.

    out: an array with any layout in memory. found: gets the values too, so that the caller can check the fingerprint of
    all parts together. Reads on all cores. Raises Rejected if the values cannot be read.
    """
    shape, chunk = self._layout(name)
    row = math.prod(out.shape[1:])
    number = int(np.ravel_multi_index(index, shape[: len(index)])) if index else 0
    before = number * shape[len(index)] * row
    step = max(1, self._block // max(1, row * out.itemsize))

    def read_block(begin: int) -> None:
      rows = out[begin : begin + step]
      values = self._rows(name, chunk, (*index, begin), rows.shape, rows.dtype)
      found.add(values, before + begin * row)
      tiles.copy(rows, values)

    list(self._threads.map(read_block, range(0, len(out), step)))
    return out

  def _layout(self, name: str) -> tuple[list[int], list[int]]:
    if name not in self._layouts:
      text = self._get(f"{name}/zarr.json", slice(None))
      if not text:
        raise Rejected(f"it has no array {name}")
      meta = json.loads(text)
      chunk, (codec,) = meta["chunk_grid"]["configuration"]["chunk_shape"], meta["codecs"]
      inner = codec["configuration"]
      if codec["name"] != "sharding_indexed" or inner["chunk_shape"] != chunk or len(inner["codecs"]) > 1:
        raise Rejected(f"{name} is stored in another format ({codec['name']})")
      self._layouts[name] = (meta["shape"], chunk)
    return self._layouts[name]

  def _rows(
    self, name: str, chunk: list[int], start: tuple[int, ...], shape: tuple[int, ...], dtype: np.dtype
  ) -> np.ndarray:
    """The values [*shape] from `start` on, in C order. They are contiguous in each chunk."""
    depth = len(start) - 1
    begin, end = start[-1], start[-1] + shape[0]
    outer = [i // size for i, size in zip(start[:-1], chunk)]
    inside = [i % size for i, size in zip(start[:-1], chunk)]
    tile, rest = chunk[depth], chunk[depth + 1 :]
    before = int(np.ravel_multi_index(inside, chunk[:depth])) * tile if depth else 0
    row = math.prod(rest) * dtype.itemsize
    grid = [-(-size // part) for size, part in zip(shape[1:], rest)]
    out: np.ndarray | None = None
    for number in range(begin // tile, -(-end // tile)):
      low, high = max(begin, number * tile), min(end, (number + 1) * tile)
      first = before + low - number * tile
      for place in np.ndindex(*grid):
        key = "/".join(map(str, (f"{name}/c", *outer, number, *place)))
        data = self._get(key, slice(first * row, (first + high - low) * row))
        if len(data) == math.prod(shape) * dtype.itemsize:
          return np.frombuffer(data, dtype).reshape(shape)
        out = np.empty(shape, dtype) if out is None else out
        target = out[(slice(low - begin, high - begin), *(slice(i * n, (i + 1) * n) for i, n in zip(place, rest)))]
        if data:
          block = np.frombuffer(data, dtype).reshape(high - low, *rest)
          target[...] = block[tuple(slice(size) for size in target.shape)]
        else:
          target[...] = 0  # a chunk of zeros is not stored
    assert out is not None
    return out

  def _get(self, key: str, part: slice) -> bytes:
    """The bytes `part` of a value; none if there is no such value."""
    try:
      return self._store.read(key, byte_range=part).result().value
    except ValueError as error:  # tensorstore has no type of its own
      raise Rejected(f"{key} cannot be read: {str(error).splitlines()[0]}") from error
