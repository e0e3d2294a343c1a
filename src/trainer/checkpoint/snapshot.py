"""Snapshots: copies of the state in the hosts' memory, one per slice, from which a recovery needs no storage.

For clusters in which one process controls all slices. Taking one costs the training thread the dispatch of the copies;
the last one is kept until the next is whole, so that there always is one.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax import Device
from jax.sharding import Mesh, NamedSharding

from trainer.checkpoint.arrays import boxes, fingerprint, state_tree, verified_load
from trainer.checkpoint.background import Background
from trainer.checkpoint.errors import Rejected
from trainer.mesh import DATA
from trainer.world import World

HOST = "pinned_host"

Log = Callable[[str], None]
Emit = Callable[..., Any]


@dataclass(frozen=True)
class Restored:
  """A verified state out of host memory, and the slice whose copy it is."""

  step: int
  state: Any
  meta: dict[str, Any]
  slice: int


@dataclass
class _Snapshot:
  step: int
  meta: dict[str, Any]
  arrays: dict[str, dict[str, Any]]  # {name: {"shape", "dtype", "fingerprint"}}
  copies: dict[int, dict[str, jax.Array]]  # by slice, in host memory
  bytes: int = 0
  blocking_seconds: float = 0.0
  seconds: float = 0.0
  clock: float = field(default_factory=time.monotonic)


class Snapshots:
  """The snapshots of this process. Outlives attempts: whoever restores says which slices' memory has survived."""

  def __init__(self, world: World, log: Log = lambda line: None, emit: Emit = lambda kind, **fields: None) -> None:
    """log takes a line, emit a kind and fields for events.jsonl; both are called from a thread."""
    self._world, self._log, self._emit = world, log, emit
    self._whole: _Snapshot | None = None
    self._background = Background("snapshot")

  def save(self, step: int, state: Any, meta: Mapping[str, Any], slices: Mapping[int, Sequence[Device]]) -> bool:
    """Starts a snapshot of `state`, whose buffers may be donated at once; False where the last one is still under way.

    slices: {id: devices} of the mesh of `state`, each of which holds a full copy (ValueError otherwise). meta is JSON.
    """
    if self._background.busy:
      return False
    self._background.wait()
    begin = time.monotonic()
    flat = state_tree.flatten(state)
    started = fingerprint.dispatch(flat)
    copies = {i: _to_host(flat, devices) for i, devices in slices.items()}
    made = _Snapshot(step, copy.deepcopy(dict(meta)), state_tree.describe(flat), copies, state_tree.state_bytes(state))
    made.blocking_seconds = time.monotonic() - begin
    self._background.start(lambda: self._finish(made, started, slices))
    return True

  def _finish(self, made: _Snapshot, started: Mapping[str, jax.Array], slices: Mapping[int, Sequence[Device]]) -> None:
    """Background: waits for the copies and decides what they are worth."""
    prints: dict[int, dict[str, str]] = {}
    for i, devices in slices.items():
      try:
        jax.block_until_ready(made.copies[i])
        values = {name: _value_on(x, devices) for name, x in started.items()}
      except jax.errors.JaxRuntimeError:  # the slice was lost while it copied: the others' copies are still good
        del made.copies[i]
        continue
      prints[i], bad = fingerprint.summarize(values)
      if bad:
        self._log(f"No snapshot of step {made.step}: the state is not finite ({bad[0]})")
        return
    if not prints:
      return
    first = next(iter(prints.values()))
    for i, found in prints.items():
      if different := [name for name, value in found.items() if value != first[name]]:
        self._log(f"No snapshot of step {made.step}: slice {i} does not hold the same {different[0]} as the others")
        self._emit("replicas_differ", step=made.step, slice=i, array=different[0])
        return
    for name, value in first.items():
      made.arrays[name]["fingerprint"] = value
    made.seconds = time.monotonic() - made.clock
    self._whole = made
    self._emit("snapshot", step=made.step, bytes=made.bytes * len(prints), blocking_seconds=made.blocking_seconds,
               seconds=made.seconds)  # fmt: skip

  def wait(self) -> None:
    """Returns when no snapshot is under way."""
    self._background.wait()

  def close(self) -> None:
    """Waits without asking how it went: the interpreter must not end while a thread is inside the runtime."""
    self._background.join()

  def keep(self, alive: Collection[int]) -> None:
    """Drops the copies of all other slices: what their memory held is gone, even if they return."""
    self.wait()
    if self._whole is not None:
      for i in set(self._whole.copies) - set(alive):
        del self._whole.copies[i]

  def newest(self, alive: Collection[int]) -> int | None:
    """The step of the newest snapshot of which one of the slices `alive` has a copy; None where there is none.

    Waits for one that is under way: the slices that live will finish it.
    """
    self.wait()
    if self._whole is None or not set(self._whole.copies) & set(alive):
      return None
    return self._whole.step

  def restore(self, abstract: Any, alive: Collection[int]) -> Restored | None:
    """The newest snapshot in the shapes, types and shardings of `abstract`, out of the copy of one of `alive`.

    None where there is none. Stays available, should the recovery fail again.
    """
    if self.newest(alive) is None:
      return None
    whole = self._whole
    assert whole is not None
    for i in sorted(set(whole.copies) & set(alive)):
      held = whole.copies[i]

      def read(targets: Mapping[str, Any], held: Mapping[str, jax.Array] = held) -> dict[str, jax.Array]:
        names = list(targets)
        placed = jax.device_put([held[name] for name in names], [targets[name].sharding for name in names])
        return dict(zip(names, jax.block_until_ready(placed)))

      try:
        state = verified_load.load(self._world, read, whole.arrays, abstract)
        return Restored(whole.step, state, copy.deepcopy(whole.meta), i)
      except Rejected as reason:
        self._log(f"The snapshot of step {whole.step} on slice {i} is not used: {reason}")
        self._emit("checkpoint_rejected", step=whole.step, tier="snapshot", reason=str(reason))
        del whole.copies[i]
    return None


def _to_host(flat: Mapping[str, jax.Array], devices: Sequence[Device]) -> dict[str, jax.Array]:
  """Copies of the arrays in the memory of one slice's hosts, dispatched and not waited for."""
  for name, x in flat.items():
    boxes.owners(name, x, devices)  # raises where the slice does not hold all of it
  views = []
  for x in flat.values():
    mesh = x.sharding.mesh
    axis = mesh.axis_names.index(DATA)
    rows = [
      row for row in range(mesh.devices.shape[axis]) if set(np.take(mesh.devices, row, axis).flat) <= set(devices)
    ]
    part = NamedSharding(Mesh(np.take(mesh.devices, rows, axis), mesh.axis_names), x.sharding.spec)
    shards = [shard.data for shard in x.addressable_shards if shard.device in part.device_set]
    views.append(jax.make_array_from_single_device_arrays(x.shape, part, shards))
  hosts = jax.device_put(views, [view.sharding.with_memory_kind(HOST) for view in views])
  return dict(zip(flat, hosts))


def _value_on(x: jax.Array, devices: Sequence[Device]) -> np.ndarray:
  """The value of a replicated array as one of `devices` has it."""
  return np.asarray(next(shard.data for shard in x.addressable_shards if shard.device in devices))
