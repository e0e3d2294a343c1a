"""Snapshots: copies of the state in the hosts' memory, one per slice, from which a recovery needs no storage.

For clusters in which one process controls all slices. A snapshot costs the training thread the dispatch of the copies.
The last restorable snapshot is kept until the next one is restorable.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax import Device
from jax.sharding import Mesh, NamedSharding, Sharding

from trainer.checkpoint.arrays import boxes, fingerprint, state_tree, verified_load
from trainer.checkpoint.checkpoint_errors import Rejected
from trainer.checkpoint.state_backup import Accept, Candidate, Emit, LogLine
from trainer.parallel.mesh import DATA
from trainer.world import World

HOST = "pinned_host"
# How long a recovery waits for a copy under way. A copy of a large state takes seconds; arrays of a slice that hangs
# never arrive.
RECOVERY_WAIT_SECONDS = 30.0
# How long training waits for a copy under way, when the next snapshot is due or the process ends.
WAIT_SECONDS = 300.0


@dataclass
class _Snapshot:
  step: int
  meta: dict[str, Any]
  arrays: dict[str, dict[str, Any]]  # {name: {"shape", "dtype", "fingerprint"}}
  copies: dict[int, dict[str, jax.Array]]  # by slice, in host memory
  bytes: int = 0
  blocking_seconds: float = 0.0
  clock: float = field(default_factory=time.monotonic)
  copying: set[int] = field(default_factory=set)  # slices whose copy is not known to be complete
  prints: dict[int, tuple[dict[str, str], list[str]]] = field(default_factory=dict)  # by slice: fingerprint.collect
  verified: bool = False  # all copies are complete and equal
  confirmed: bool = False  # `confirm` was called for its step


class Snapshots:
  """The snapshots of this process. Lives longer than an attempt. Implements StateBackup."""

  tier = "snapshot"

  def __init__(self, world: World, log: LogLine = lambda line: None, emit: Emit = lambda kind, **fields: None) -> None:
    """log takes a line, emit a kind and fields for events.jsonl; both are called from threads."""
    self._world, self._log, self._emit = world, log, emit
    self._slices: dict[int, tuple[Device, ...]] = {}
    self._checked = False  # whether each of the slices holds a whole copy
    self._changed = threading.Condition(threading.RLock())  # guards everything below
    self._pending: _Snapshot | None = None  # not restorable yet: still copying, or its step is not confirmed
    self._whole: _Snapshot | None = None  # restorable
    self._confirmed = 0
    self._reserved = False

  def begin_attempt(self, slices: Mapping[int, Sequence[Device]], survivors: Collection[int]) -> None:
    """To be called before the other methods, at the start of every attempt.

    slices: {id: devices} of the attempt's mesh. survivors: slices whose host memory still has what it had. Copies on
    all other slices are dropped for good, even if such a slice returns. After a loss a copy under way gets
    RECOVERY_WAIT_SECONDS; then it is abandoned and the last restorable snapshot is used.
    """
    # Imports Orbax, which takes long: not when this module is imported, and not while the first snapshot is made.
    import pathwaysutils.experimental.concatenate_by_mesh_axis
    import pathwaysutils.experimental.split_by_mesh_axis  # noqa: F401

    self._slices, self._checked = {i: tuple(devices) for i, devices in slices.items()}, False
    with self._changed:
      lost = False
      for snapshot in filter(None, (self._pending, self._whole)):
        for i in set(snapshot.copies) - set(survivors):
          del snapshot.copies[i]
          snapshot.copying.discard(i)
          lost = True
      self._advance()
      if self._pending is not None and not self._pending.confirmed:
        # Nothing will confirm it any more, so do not wait for its copies. After a hang they would never arrive.
        self._log(f"The snapshot of step {self._pending.step} is dropped: the step was not recorded.")
        self._pending = None
      self._wait(RECOVERY_WAIT_SECONDS if lost else WAIT_SECONDS)
      self._pending = None
      self._changed.notify_all()  # a thread of the attempt that was given up may still wait
      self._confirmed = 0  # the attempt may repeat steps, whose snapshots must be confirmed again

  def reserve(self, state: Any) -> None:
    """Makes a process with GPUs lock memory for two snapshots of `state`, which it keeps. On other platforms: nothing.

    Locking takes 0.4 s per GB on an H200's host, and would hold up the first two snapshots. To be called while the step
    is compiled.
    """
    arrays = list(state_tree.flatten(state).values())
    if not self._reserved and next(iter(arrays[0].devices())).platform == "gpu":
      targets = [x.sharding.with_memory_kind(HOST) for x in arrays]
      jax.block_until_ready([jax.device_put(arrays, targets) for _ in range(2)])
    self._reserved = True

  def save(self, step: int, state: Any, meta: Mapping[str, Any]) -> bool:
    """Starts a snapshot of `state`, whose buffers may be donated at once; False while a copy is still under way.

    The snapshot can be restored after `confirm(step)`. Every slice of the attempt must hold a full copy of the state
    (ConfigError otherwise). meta is JSON.
    """
    if self.busy:
      return False
    begin = time.monotonic()
    flat = state_tree.flatten(state)
    if not self._checked:  # once for each attempt: it takes 0.17 s for 8 slices of 64 devices
      for name, x in flat.items():
        for devices in self._slices.values():
          boxes.owners(name, x, devices)
      self._checked = True
    started = fingerprint.dispatch(flat)
    copies, prints = _to_host(flat, started, self._slices)
    made = _Snapshot(step, copy.deepcopy(dict(meta)), state_tree.describe(flat), copies, state_tree.state_bytes(state))
    made.copying = set(copies)
    made.blocking_seconds = time.monotonic() - begin
    with self._changed:
      made.confirmed = self._confirmed >= step
      self._pending = made
    # One thread per slice: a slice that never answers must not hold up the others' copies.
    for i, copied in list(copies.items()):
      args = (made, i, copied, prints[i])
      threading.Thread(target=self._watch, args=args, name=f"snapshot-{i}", daemon=True).start()
    return True

  def confirm(self, step: int) -> None:
    """To be called when `step` is known to be good and its record is written.

    Before that a snapshot of `step` is never restored: a run that resumed from it would never write the record.
    """
    with self._changed:
      self._confirmed = max(self._confirmed, step)
      if self._pending is not None and self._pending.step <= step:
        self._pending.confirmed = True
        self._advance()

  @property
  def busy(self) -> bool:
    with self._changed:
      return self._pending is not None and bool(self._pending.copying)

  def wait(self) -> None:
    """Returns when no copy is under way. Abandons a copy that takes longer than WAIT_SECONDS."""
    with self._changed:
      self._wait(WAIT_SECONDS)

  def _wait(self, seconds: float) -> None:
    made = self._pending
    if made is not None and not self._changed.wait_for(lambda: made is not self._pending or not made.copying, seconds):
      self._log(
        f"The snapshot of step {made.step} is abandoned: slices {sorted(made.copying)} have not copied it in "
        f"{seconds:g} s."
      )
      self._pending = None

  def close(self) -> None:
    """Waits for a copy under way: the interpreter must not end while a thread is inside the runtime."""
    with self._changed:
      self._wait(RECOVERY_WAIT_SECONDS)

  def _watch(self, made: _Snapshot, i: int, copied: Mapping[str, jax.Array], prints: fingerprint.Started) -> None:
    """Thread: waits for the copy of slice i."""
    found = None
    try:
      jax.block_until_ready(copied)
      found = fingerprint.collect(prints)
    except jax.errors.JaxRuntimeError:
      pass  # the slice was lost; other slices' copies are still good
    finally:
      with self._changed:
        if made is self._pending and i in made.copying:
          if found is None:
            del made.copies[i]
          else:
            made.prints[i] = found
          made.copying.discard(i)
          self._advance()
          self._changed.notify_all()

  def _advance(self) -> None:
    """Verifies the pending snapshot when all its copies are there, and makes it restorable when it is confirmed."""
    made = self._pending
    if made is None or made.copying:
      return
    if not made.verified:
      made.verified = self._verify(made)
      if not made.verified:
        self._pending = None
        return
    if made.confirmed:
      self._whole, self._pending = made, None

  def _verify(self, made: _Snapshot) -> bool:
    prints = {i: made.prints[i] for i in sorted(made.prints) if i in made.copies}
    if not prints:
      return False
    first, _ = next(iter(prints.values()))
    for i, (found, not_finite) in prints.items():
      if not_finite:
        self._log(f"No snapshot of step {made.step}: the state is not finite ({not_finite[0]})")
        return False
      if different := [name for name, value in found.items() if value != first[name]]:
        self._log(f"No snapshot of step {made.step}: slice {i} does not hold the same {different[0]} as the others")
        self._emit("replicas_differ", step=made.step, slice=i, array=different[0])
        return False
    for name, value in first.items():
      made.arrays[name]["fingerprint"] = value
    self._emit("snapshot", step=made.step, bytes=made.bytes * len(prints), blocking_seconds=made.blocking_seconds,
               seconds=time.monotonic() - made.clock)  # fmt: skip
    return True

  def candidates(self) -> list[Candidate]:
    """One candidate for every slice with a copy of the last restorable snapshot."""
    whole = self._whole
    return [] if whole is None else [Candidate(whole.step, str(i)) for i in sorted(whole.copies)]

  def restore(self, candidate: Candidate, abstract: Any, accept: Accept) -> tuple[Any, dict[str, Any]]:
    """(state, meta) from the copy of one slice. The copy stays available for another recovery, also after an error of
    the runtime: the slice that holds it may not answer, or one that receives it.

    `accept` is not called: this process itself took the snapshot.
    """
    whole, i = self._whole, int(candidate.copy)
    assert whole is not None and whole.step == candidate.step
    held = whole.copies[i]

    def read(targets: Mapping[str, Any]) -> dict[str, jax.Array]:
      names = list(targets)
      placed = _to_slices([held[name] for name in names], [targets[name].sharding for name in names])
      return dict(zip(names, jax.block_until_ready(placed)))

    try:
      return verified_load.load(self._world, read, whole.arrays, abstract), copy.deepcopy(whole.meta)
    except Rejected:
      del whole.copies[i]
      raise

  def path(self, candidate: Candidate) -> str:
    return f"memory of slice {candidate.copy}"


def _to_host(
  flat: Mapping[str, jax.Array], started: fingerprint.Started, slices: Mapping[int, Sequence[Device]]
) -> tuple[dict[int, dict[str, jax.Array]], dict[int, fingerprint.Started]]:
  """Copies of the arrays and of their fingerprints by slice, in the memory of its hosts: dispatched, not waited for.

  All arrays are copied together and then split, because a Pathways proxy needs one request for each of the two.
  """
  from pathwaysutils.experimental.split_by_mesh_axis import split_by_mesh_axis

  together = [*flat.values(), started.values]
  hosts = jax.device_put(together, [x.sharding.with_memory_kind(HOST) for x in together])
  copies, prints = {}, {}
  for part in split_by_mesh_axis(hosts, DATA, len(slices)):
    i = next(i for i, devices in slices.items() if set(devices) == part[0].sharding.device_set)
    copies[i] = dict(zip(flat, part))
    prints[i] = fingerprint.Started(started.names, part[-1])
  return copies, prints


def _to_slices(held: list[jax.Array], shardings: list[Sharding]) -> list[jax.Array]:
  """Copies of the arrays of one slice with these shardings: dispatched, not waited for.

  Where each slice gets the same copy, all arrays are copied to one slice after the other and then joined. A Pathways
  proxy needs one request for each slice, and one to join. With the shardings of all slices, device_put would copy each
  array to each slice by itself.
  """
  from pathwaysutils.experimental.concatenate_by_mesh_axis import concatenate_by_mesh_axis

  parts = _by_slice(shardings, len(held[0].sharding.device_set))
  if len(parts) == 1:
    return jax.device_put(held, shardings)
  copies = iter(jax.device_put(held * len(parts), [sharding for part in parts for sharding in part]))
  return concatenate_by_mesh_axis([[next(copies) for _ in part] for part in parts], DATA)


def _by_slice(shardings: list[Sharding], devices: int) -> list[list[Sharding]]:
  """The shardings for each group of so many devices, if all groups hold the same; else one list, the shardings."""
  first = shardings[0]
  if not isinstance(first, NamedSharding):
    return [shardings]
  mesh, axis = first.mesh, first.mesh.axis_names.index(DATA)
  groups = mesh.size // devices
  if mesh.size % devices or mesh.devices.shape[axis] % groups:
    return [shardings]
  meshes = [Mesh(part, mesh.axis_names, axis_types=mesh.axis_types) for part in np.split(mesh.devices, groups, axis)]
  return [
    [NamedSharding(part, sharding.spec, memory_kind=sharding.memory_kind) for sharding in shardings] for part in meshes
  ]
