"""The emergency tier: frequent saves to a local folder (ramdisk), one full copy of the state per slice.

Every process writes what its devices hold of each of its slices, without waiting for other processes
(local_copies.py has the files). After a failure the processes exchange lists of the parts that they still have. The
newest step that is complete over all hosts and slices is restored; a replaced host gets its parts from the other
copies.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Device

from trainer.checkpoint import checksums
from trainer.checkpoint.arrays import boxes, fingerprint, from_hosts, host_copy, state_tree, verified_load
from trainer.checkpoint.arrays.boxes import Box
from trainer.checkpoint.background import Background
from trainer.checkpoint.checkpoint_errors import NonFiniteState, Rejected, SaveFailed
from trainer.checkpoint.local_copies import ENTRY, Copy, Listed, LocalCopies, box_of, folder, identity
from trainer.checkpoint.state_backup import Accept, Candidate, RunContext, committed
from trainer.checkpoint.together import together
from trainer.config import rules
from trainer.config.errors import ConfigError, require
from trainer.config.schema import CheckpointSection

ALIGNMENT = 64  # bytes: parts can be viewed as any type in place
COPIES = 2  # of each slice that are kept: while one is written, the one before it is whole


class Emergency:
  """Saves and restores in a local folder: the StateBackup on the hosts' own disks."""

  tier = "emergency"

  def __init__(
    self,
    cfg: CheckpointSection,
    run_directory: str,
    slices: Mapping[int, Sequence[Device]],
    run: RunContext,
  ) -> None:
    """slices: {id: devices} of the living slices. Raises ConfigError if the tier cannot write there."""
    require(rules.emergency_tier(cfg))
    self._cfg, self._run, self._run_id = cfg, identity(run_directory), run.run_id
    self._log, self._emit = run.log, run.emit
    self._slices = {i: tuple(devices) for i, devices in slices.items()}
    self._world, self._fetch = run.world, run.fetch
    self.root = folder(cfg.local_checkpoint_directory, run_directory) / run.run_id
    self._copies = LocalCopies(self.root, run.run_id)
    self._background = Background("emergency-checkpoint")
    self._failed = 0  # the step of the last save, if it failed on this process
    self._probe()

  def _probe(self) -> None:
    try:
      self.root.mkdir(parents=True, exist_ok=True)
      with tempfile.TemporaryFile(dir=self.root) as file:  # without a name: slices on one host may share the folder
        file.write(b"x")
    except OSError as error:
      raise ConfigError(
        f"local_checkpoint_directory={self._cfg.local_checkpoint_directory} cannot be written ({error}): mount the "
        "ramdisk there, make it writable, or set enable_emergency_checkpoint=false"
      ) from error

  # ---- saving ----

  def parts(self, state: Any) -> dict[int, list[tuple[str, Box, Device]]]:
    """{slice: (array, box, local device that has it)} that this process writes of a state or its abstract form.

    Raises ConfigError if a slice does not hold a full copy.
    """
    flat = state_tree.flatten(state)
    return {
      i: [
        (name, box, device)
        for name, x in flat.items()
        for box, device in boxes.owners(name, x, devices).items()
        if boxes.is_local(device)
      ]
      for i, devices in self._slices.items()
      if any(map(boxes.is_local, devices))
    }

  def save(self, step: int, state: Any, meta: Mapping[str, Any]) -> bool:
    """Starts a save; returns when the state has been copied to the host, so that its buffers may be donated.

    Raises SaveFailed or NonFiniteState for the save before this one.
    """
    self.wait()
    failed, self._failed = self._world.gather(self._failed), 0
    begin = time.monotonic()
    flat = state_tree.flatten(state)
    started = fingerprint.dispatch(flat)
    if self._fetch is not None:
      started = self._fetch(functools.partial(host_copy.read, flat, started), f"the local copy of step {step}")
    copies = {
      Copy(step, i, self._world.rank): [(name, box, boxes.host_copy(flat[name], device)) for name, box, device in parts]
      for i, parts in self.parts(state).items()
    }
    full_meta = dict(meta, step=step, arrays=state_tree.describe(flat))
    blocked = time.monotonic() - begin

    def work() -> None:
      try:
        # Without the parts of a process a step cannot be restored: it must not replace an older one.
        self._copies.remove([copy for copy in self._copies.files("json") if copy.step in failed and self._owns(copy)])
        self._collect_garbage(step)
        self._copies.remove(list(copies))
        self._make_room(sum(data.nbytes for parts in copies.values() for _, _, data in parts))
        self._write(copies, started, full_meta)
      except OSError as error:
        with contextlib.suppress(OSError):  # report the first error
          self._copies.remove(list(copies))
        self._failed = step
        raise SaveFailed(
          f"step {step} could not be saved in {self.root}: {error}. Give local_checkpoint_directory the space that "
          "trainer.tools.preflight prints, or set enable_emergency_checkpoint=false"
        ) from error
      committed(self, Candidate(step), begin, blocked, self._emit, self._log)

    self._background.start(work)
    if not self._cfg.async_checkpointing:
      self.wait()
    return True

  def _write(
    self,
    copies: Mapping[Copy, Sequence[tuple[str, Box, np.ndarray]]],
    started: fingerprint.Started,
    meta: dict[str, Any],
  ) -> None:
    prints, bad = fingerprint.collect(started)
    if bad:
      raise NonFiniteState(f"the state of step {meta['step']} is not finite ({bad[0]}): no emergency checkpoint of it")
    for name, value in prints.items():
      meta["arrays"][name]["fingerprint"] = value
    digest = hashlib.sha256("".join(f"{name}{value}" for name, value in sorted(prints.items())).encode()).hexdigest()
    for copy, parts in copies.items():
      index: list[dict[str, Any]] = []
      binary = copy.path(self.root, "bin")
      with binary.open("wb") as file:
        for name, box, data in parts:
          file.seek(-(-file.tell() // ALIGNMENT) * ALIGNMENT)
          raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
          index.append({"array": name, "box": box, "offset": file.tell(), "crc32": zlib.crc32(raw.data)})
          file.write(raw.data)
      entry = {"run": self._run_id, "digest": digest[:16], "meta": meta, "parts": index, "slice": copy.slice}
      final = copy.path(self.root, "json")
      temporary = Path(f"{final}.tmp")
      temporary.write_bytes(checksums.dump(entry))
      os.replace(temporary, final)

  def _collect_garbage(self, step: int) -> None:
    """Deletes old copies, so that with `step` at most COPIES copies of each slice remain.

    Also deletes copies of `step` and later steps: they are left from before a restore of an older step. Copies of
    slices and processes that are gone stay until they are older than all of this process's copies. If this process has
    none, because the host had the place of another slice before, the newest of them stay.
    """
    entries = {*self._copies.files("json"), *self._copies.files("bin")}
    mine = set(filter(self._owns, entries))
    gone = {e for e in entries if e.slice not in self._slices or e.process >= self._world.size}

    def newest(copies: set[Copy]) -> list[int]:
      steps = sorted({e.step for e in copies if e.step < step and e.path(self.root, "json").exists()})
      return steps[-(COPIES - 1) :]

    kept = newest(mine)
    oldest = min(kept or newest(gone), default=step)
    self._copies.remove([e for e in mine if e.step not in kept] + [e for e in gone if e.step < oldest])

  def _owns(self, copy: Copy) -> bool:
    """Whether this process has written the copy, or another process in its place."""
    return copy.process == self._world.rank and copy.slice in self._slices

  def _other_runs(self) -> list[Path]:
    """The folders of earlier runs in the same run folder, which was then deleted or moved."""
    return sorted(path for path in self.root.parent.iterdir() if path.is_dir() and path != self.root)

  def mention_other_runs(self) -> None:
    """Logs where local copies of earlier runs lie, and how to use them. For a start from step 0."""
    for path in self._other_runs():
      if steps := [int(m[1]) for m in map(ENTRY.fullmatch, os.listdir(path)) if m and m[4] == "json"]:
        self._log(
          f"Local copies of step {max(steps)} in {path} are not used: they belong to an earlier run in {self._run}, "
          "which was deleted or moved. Delete them to free the space. A local save deletes them if it needs the space. "
          f"To continue the earlier run instead, stop this one, delete {self._run}/checkpoints and write {path.name} "
          f"into {self._run}/run_id"
        )

  def _make_room(self, size: int) -> None:
    """Deletes local copies of earlier runs if a save of `size` bytes would not fit otherwise."""
    for path in self._other_runs():
      if shutil.disk_usage(self.root).free < size:
        self._log(f"Deleted {path}, local copies of an earlier run: a local save needs the space.")
        with contextlib.suppress(FileNotFoundError):  # another slice on this host deletes them too
          shutil.rmtree(path)

  def wait(self) -> None:
    """Returns when the save in flight is complete on this process. Raises SaveFailed or NonFiniteState."""
    self._background.wait()

  def check(self) -> None:
    """As `wait`, but does not wait."""
    self._background.check()

  # ---- restoring ----

  def newest(self) -> int:
    """The newest step that this world can restore; 0: none. Logs nothing. Every process raises CheckpointError if one
    of them cannot list its copies."""
    whole, _ = self._known(together(self._world, self._copies.listed)[0])
    return max((candidate.step for candidate in whole), default=0)

  def candidates(self) -> list[Candidate]:
    """Saves that are complete if the parts of all processes are put together, newest first."""
    listed, damage = together(self._world, self._copies.listed)
    for line in damage:
      self._log(line)
    whole, partial = self._known(listed)
    for step in sorted({c.step for c in partial} - {c.step for c in whole}, reverse=True):
      self._log(f"Emergency checkpoint {step} is not used: parts of it are missing on every slice.")
    return sorted(whole, key=lambda c: (c.step, c.copy), reverse=True)

  def _known(self, mine: Sequence[Listed]) -> tuple[set[Candidate], set[Candidate]]:
    """The saves whose copies all processes know of: (those with all parts, those that lack parts)."""
    have: dict[Candidate, dict[str, set[Box]]] = {}
    shapes: dict[Candidate, dict[str, list[int]]] = {}
    everywhere = itertools.chain.from_iterable(self._world.gather([copy.to_json() for copy in mine]))
    for copy in map(Listed.from_json, everywhere):
      shapes[copy.candidate] = copy.shapes
      for name, box in copy.parts:
        have.setdefault(copy.candidate, {}).setdefault(name, set()).add(box)
    whole = {
      candidate
      for candidate, arrays in shapes.items()
      if all(boxes.complete(shape, have.get(candidate, {}).get(name, ())) for name, shape in arrays.items())
    }
    return whole, shapes.keys() - whole

  def path(self, candidate: Candidate) -> str:
    return f"{self.root}/{candidate.step}"

  def restore(self, candidate: Candidate, abstract: Any, accept: Accept) -> tuple[Any, dict[str, Any]]:
    """(state, meta), assembled from the undamaged parts of all processes."""
    held, meta, damage = together(self._world, functools.partial(self._copies.held, candidate))
    for line in damage:
      self._log(line)
      self._emit("checkpoint_rejected", step=candidate.step, tier="emergency", reason=line)
    rows = self._world.gather({name: sorted(parts) for name, parts in held.items()})
    table = [{name: set(map(box_of, boxes_of)) for name, boxes_of in row.items()} for row in rows]
    has_meta = self._world.gather(bool(meta))
    if not any(has_meta):
      raise Rejected("all its copies are damaged")
    first = has_meta.index(True)
    meta = self._world.gather(meta if first == self._world.rank else None)[first]
    accept(meta)
    for name, x in meta["arrays"].items():
      if not boxes.complete(x["shape"], set().union(*[row.get(name, set()) for row in table])):
        raise Rejected(f"a part of {name} is damaged or missing in every copy")
    self._log(f"Restoring checkpoint from {self.path(candidate)}.")

    def read(targets: Mapping[str, Any]) -> dict[str, jax.Array]:
      return {name: from_hosts.assemble(self._world, name, x, held.get(name, {}), table) for name, x in targets.items()}

    return verified_load.load(self._world, read, meta["arrays"], abstract), meta
