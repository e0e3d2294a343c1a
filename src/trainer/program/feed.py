"""The batches of a program: each process reads, places and counts its own rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Device
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from input_pipeline import tally
from input_pipeline.batch import Batch
from input_pipeline.loader import Loader
from input_pipeline.tally import Tally
from trainer.program.program import Program
from trainer.program.step import MicroBatches


class Feed:
  """Maps index to the batch of step index + 1 on the program's mesh. A process reads and places only its own rows."""

  def __init__(self, loader: Loader, prog: Program) -> None:
    self._loader, self._rounds = loader, prog.batch
    self._local = [_local_rows(batch.tokens) for batch in prog.batch]
    of = lambda parts: np.concatenate([group.reshape(-1)[at] for group, at in zip(prog.plan.groups, parts)])
    self._rows = of([at for at, _ in self._local])
    self._counted = np.concatenate([is_first for _, is_first in self._local])
    self._rows_per_share = prog.plan.rows.size
    self.over_processes = _over_processes(tuple(prog.mesh.devices.flat))
    """Starts the sum of the `Tally.numbers` of the processes of the mesh. All of them call it, in the same order."""

  def __call__(self, index: int) -> MicroBatches:
    """Returns batches of global arrays [A, rows, T]. The rows of other processes are not read here."""
    return self._placed(self._loader.batch(index, self._rows))

  def tallied(self, index: int, *, hashes: bool) -> tuple[MicroBatches, Tally]:
    """Returns the batches, and the tally of the rows that this process counts: each row is counted by one process."""
    found = self._loader.batch(index, self._rows)
    return self._placed(found), self._tally(self._rows, found, hashes)

  def share(self, index: int, share: int) -> Batch:
    """Returns the part `share` of the batch, for a program whose plan is that of one share."""
    (batch,) = self._placed(self._loader.batch(index, self._rows_of(share)))
    return batch

  def tallied_share(self, index: int, share: int, *, hashes: bool) -> tuple[Batch, Tally]:
    """Returns what `share` returns, and the tally of its rows that this process counts."""
    rows = self._rows_of(share)
    found = self._loader.batch(index, rows)
    (batch,) = self._placed(found)
    return batch, self._tally(rows, found, hashes)

  def _rows_of(self, share: int) -> np.ndarray:
    return self._rows + share * self._rows_per_share

  def _tally(self, rows: np.ndarray, found: Batch, hashes: bool) -> Tally:
    return tally.of_rows(np.where(self._counted, rows, -1), found, hashes=hashes)

  def _placed(self, rows_of_process: Batch) -> MicroBatches:
    cuts = np.cumsum([len(at) for at, _ in self._local])[:-1]
    groups = zip(*(np.split(array, cuts) for array in rows_of_process))
    return tuple(
      Batch(*(_place(host, at, abstract) for host, abstract in zip(group, batch)))
      for group, (at, _), batch in zip(groups, self._local, self._rounds)
    )


def _local_rows(abstract: jax.ShapeDtypeStruct) -> tuple[np.ndarray, np.ndarray]:
  """Returns which of the A * rows rows of an array [A, rows, T] the devices of this process have, int [local rows], and
  of which of them no process with a lower index has a part, bool [local rows]."""
  first = np.full(abstract.shape[:2], jax.process_count())
  local = np.zeros(abstract.shape[:2], bool)
  for device, index in abstract.sharding.devices_indices_map(abstract.shape).items():
    first[index[:2]] = np.minimum(first[index[:2]], device.process_index)
    local[index[:2]] |= device.process_index == jax.process_index()
  return np.flatnonzero(local), (first == jax.process_index())[local]


def _place(host: np.ndarray, at: np.ndarray, abstract: jax.ShapeDtypeStruct) -> jax.Array:
  """Returns the global array [A, rows, T] whose rows `at` are `host`, on the devices of this process."""
  rounds, rows, length = abstract.shape
  whole = np.empty((rounds * rows, length), host.dtype)
  whole[at] = host
  whole = whole.reshape(abstract.shape)
  return jax.make_array_from_callback(abstract.shape, abstract.sharding, lambda part: whole[part])


@functools.lru_cache(maxsize=64)
def _over_processes(devices: tuple[Device, ...]) -> Callable[[np.ndarray], Any]:
  """Returns `Feed.over_processes` for these devices. Compiles, if there are several processes."""
  if len({device.process_index for device in devices}) == 1:
    return lambda numbers: numbers
  mesh = Mesh(np.array(devices), ("all",))
  rows, total = (NamedSharding(mesh, PartitionSpec(*names)) for names in (("all",), ()))
  shape = (mesh.size, Tally.SIZE)
  abstract = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=rows)
  compiled = jax.jit(lambda of_all: jnp.sum(of_all, axis=0), out_shardings=total).lower(abstract).compile()

  def add(numbers: np.ndarray) -> Any:
    parts = [numbers, *[np.zeros_like(numbers)] * (len(mesh.local_devices) - 1)]
    arrays = [jax.device_put(part[None], device) for part, device in zip(parts, mesh.local_devices, strict=True)]
    return compiled(jax.make_array_from_single_device_arrays(shape, rows, arrays))

  return add
