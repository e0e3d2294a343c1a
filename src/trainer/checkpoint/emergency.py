"""The emergency tier: frequent saves to a local folder (ramdisk), one full copy of the state per slice.

Every process writes what its devices hold of each of its slices, without waiting for other processes:
  {local_checkpoint_directory}/{run}/{id}/{step}.s{slice}.p{process}.bin   the parts of the arrays
  {local_checkpoint_directory}/{run}/{id}/{step}.s{slice}.p{process}.json  what is where, with a CRC-32 each; last
{run} is the run's name and a hash of where the run's folder is, {id} the content of {run}/run_id: runs of the same name
in different folders, or one after the other in the same folder, have no local copies in common.
After a failure the processes exchange lists of the parts that they still have. The newest step that is complete over
all hosts and slices is restored; a replaced host gets its parts from the other copies.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import shutil
import tempfile
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Device

from trainer.checkpoint import checksums
from trainer.checkpoint.arrays import boxes, fingerprint, from_hosts, host_copy, state_tree, verified_load
from trainer.checkpoint.arrays.boxes import Box
from trainer.checkpoint.arrays.host_copy import Fetch
from trainer.checkpoint.background import Background
from trainer.checkpoint.backup import Accept, Candidate, Emit, Log
from trainer.checkpoint.errors import CheckpointError, NonFiniteState, Rejected
from trainer.checkpoint.meta import check_meta
from trainer.config import rules
from trainer.config.errors import ConfigError, require
from trainer.config.schema import CheckpointSection
from trainer.world import World

NUMBER = "(0|[1-9][0-9]{0,17})"
ENTRY = re.compile(rf"{NUMBER}\.s{NUMBER}\.p{NUMBER}\.(json|bin)")
ALIGNMENT = 64  # bytes: parts can be viewed as any type in place
COPIES = 2  # of each slice that are kept: while one is written, the one before it is whole


@dataclass(frozen=True)
class _Copy:
  """The copy that one process wrote of its part of one slice at one step."""

  step: int
  slice: int
  process: int

  def path(self, root: Path, kind: str) -> Path:
    return root / f"{self.step}.s{self.slice}.p{self.process}.{kind}"


def _identity(run_directory: str) -> str:
  """A text that is the same for every spelling of one folder."""
  return run_directory.rstrip("/") if "://" in run_directory else os.path.realpath(run_directory)


def folder(local_directory: str | Path, run_directory: str) -> Path:
  """Where every host keeps the local copies of the runs in `run_directory`, each run in a folder named by its id."""
  run = _identity(run_directory)
  return Path(local_directory).expanduser() / f"{run.rsplit('/', 1)[-1]}-{hashlib.sha256(run.encode()).hexdigest()[:8]}"


class Emergency:
  """Saves and restores in a local folder: the StateBackup on the hosts' own disks."""

  tier = "emergency"

  def __init__(
    self,
    cfg: CheckpointSection,
    run_directory: str,
    slices: Mapping[int, Sequence[Device]],
    *,
    world: World,
    run_id: str,
    fetch: Fetch | None = None,
    log: Log = lambda line: None,
    emit: Emit = lambda kind, **fields: None,
  ) -> None:
    """slices: {id: devices} of the living slices. fetch: see host_copy; for devices behind a proxy.

    Raises ConfigError if the tier cannot write there."""
    require(rules.emergency_tier(cfg))
    self._cfg, self._run, self._run_id = cfg, _identity(run_directory), run_id
    self._log, self._emit = log, emit
    self._slices = {i: tuple(devices) for i, devices in slices.items()}
    self._world, self._fetch = world, fetch
    self.root = folder(cfg.local_checkpoint_directory, run_directory) / run_id
    self._background = Background("emergency-checkpoint")
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

    Raises CheckpointError or NonFiniteState for the save before this one.
    """
    self.wait()
    begin = time.monotonic()
    flat = state_tree.flatten(state)
    started = fingerprint.dispatch(flat)
    if self._fetch is not None:
      started = self._fetch(functools.partial(host_copy.read, flat, started), f"the local copy of step {step}")
    copies = {
      _Copy(step, i, self._world.rank): [
        (name, box, boxes.host_copy(flat[name], device)) for name, box, device in parts
      ]
      for i, parts in self.parts(state).items()
    }
    full_meta = dict(meta, step=step, arrays=state_tree.describe(flat))
    blocked = time.monotonic() - begin

    def work() -> None:
      try:
        self._collect_garbage(step)
        self._remove(list(copies))
        self._make_room(sum(data.nbytes for parts in copies.values() for _, _, data in parts))
        self._write(copies, started, full_meta)
      except OSError as error:
        with contextlib.suppress(OSError):  # report the first error
          self._remove(list(copies))
        raise CheckpointError(
          f"step {step} could not be saved in {self.root}: {error}. Give local_checkpoint_directory the space that "
          "trainer.tools.preflight prints, or raise local_checkpoint_period and set enable_emergency_checkpoint=false"
        ) from error
      self._emit("checkpoint_saved", step=step, tier="emergency", path=str(self.root), blocking_seconds=blocked,
                 seconds=time.monotonic() - begin)  # fmt: skip

    self._background.start(work)
    if not self._cfg.async_checkpointing:
      self.wait()
    return True

  def _write(
    self,
    copies: Mapping[_Copy, Sequence[tuple[str, Box, np.ndarray]]],
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

  def _entries(self, kind: str) -> list[_Copy]:
    found = [ENTRY.fullmatch(path.name) for path in self.root.iterdir()]
    return [_Copy(int(m[1]), int(m[2]), int(m[3])) for m in found if m and m[4] == kind]

  def _collect_garbage(self, step: int) -> None:
    """Deletes old copies, so that with `step` at most COPIES copies of each slice remain.

    Also deletes copies of `step` and later steps: they are left from before a restore of an older step. Copies of
    slices and processes that are gone stay until they are older than all of this process's copies.
    """
    entries = {*self._entries("json"), *self._entries("bin")}
    mine = {entry for entry in entries if entry.process == self._world.rank and entry.slice in self._slices}
    past = sorted({entry.step for entry in mine if entry.step < step and entry.path(self.root, "json").exists()})
    kept = set(past[-(COPIES - 1) :])
    oldest = min(kept, default=step)
    gone = [e for e in entries if e.slice not in self._slices or e.process >= self._world.size]
    self._remove([entry for entry in mine if entry.step not in kept] + [e for e in gone if e.step < oldest])

  def _other_runs(self) -> list[Path]:
    """The folders of earlier runs in the same run folder, which was then deleted or moved."""
    return sorted(path for path in self.root.parent.iterdir() if path.is_dir() and path != self.root)

  def mention_other_runs(self) -> None:
    """Logs where local copies of earlier runs lie, and how to use them. For a start from step 0."""
    for path in self._other_runs():
      if steps := [int(m[1]) for m in map(ENTRY.fullmatch, os.listdir(path)) if m and m[4] == "json"]:
        self._log(
          f"Local copies of step {max(steps)} in {path} are not used: they belong to an earlier run in {self._run}, "
          "which was deleted or moved. Delete them to free the space; a local save that needs the space does so too. "
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

  def _remove(self, copies: Sequence[_Copy]) -> None:
    for copy in copies:
      for kind in ("json", "json.tmp", "bin"):  # the json first: without it the bin is not used
        path = copy.path(self.root, kind)
        if path.is_dir() and not path.is_symlink():  # not ours, but a save needs the name
          shutil.rmtree(path)
        else:
          path.unlink(missing_ok=True)

  def wait(self) -> None:
    """Returns when the save in flight is complete on this process. Raises CheckpointError if it failed."""
    self._background.wait()

  def check(self) -> None:
    """Raises CheckpointError if a save in the background has failed. Does not wait."""
    self._background.check()

  # ---- restoring ----

  def candidates(self) -> list[Candidate]:
    """Saves that are complete if the parts of all processes are put together, newest first.

    Candidate.copy is the digest of the fingerprints: saves with equal digests are equal bit by bit, and their parts can
    be mixed.
    """
    have: dict[Candidate, dict[str, set[Box]]] = {}
    shapes: dict[Candidate, dict[str, Any]] = {}
    mine = []
    for entry in self._read_entries():
      mine.append([
        entry["meta"]["step"],
        entry["digest"],
        {name: x["shape"] for name, x in entry["meta"]["arrays"].items()},
        [(part["array"], part["box"]) for part in entry["parts"]],
      ])  # fmt: skip
    for step, digest, arrays, parts in [entry for entries in self._world.gather(mine) for entry in entries]:
      candidate = Candidate(step, digest)
      shapes[candidate] = arrays
      for name, box in parts:
        have.setdefault(candidate, {}).setdefault(name, set()).add(_box(box))
    whole = [
      candidate
      for candidate, arrays in shapes.items()
      if all(boxes.complete(shape, have[candidate].get(name, ())) for name, shape in arrays.items())
    ]
    for step in sorted({c.step for c in shapes} - {c.step for c in whole}, reverse=True):
      self._log(f"Emergency checkpoint {step} is not used: parts of it are missing on every slice.")
    return sorted(whole, key=lambda c: (c.step, c.copy), reverse=True)

  def _read_entries(self) -> list[dict[str, Any]]:
    """The undamaged indices of this host and this run, each with "file", the path of its data."""
    entries = []
    for copy in sorted(self._entries("json"), key=lambda c: (c.step, c.slice, c.process)):
      path = copy.path(self.root, "json")
      try:
        entry = checksums.parse(checksums.read(path), path.name)
        _check_entry(entry)
      except Rejected as reason:
        self._log(f"Emergency checkpoint {path} is not used: {reason}")
        continue
      if entry["run"] == self._run_id and entry["meta"]["step"] == copy.step:
        entries.append(entry | {"file": copy.path(self.root, "bin")})
    return entries

  def path(self, candidate: Candidate) -> str:
    return f"{self.root}/{candidate.step}"

  def restore(self, candidate: Candidate, abstract: Any, accept: Accept) -> tuple[Any, dict[str, Any]]:
    """(state, meta), assembled from the undamaged parts of all processes."""
    held, meta = self._held(candidate)
    counts = [bool(m) for m in self._world.gather(bool(meta))]
    if not any(counts):
      raise Rejected("all its copies are damaged")
    meta = self._world.gather(meta if counts.index(True) == self._world.rank else None)[counts.index(True)]
    accept(meta)
    table = [
      {name: set(map(_box, found)) for name, found in boxes_of.items()}
      for boxes_of in self._world.gather({name: list(parts) for name, parts in held.items()})
    ]
    for name, x in meta["arrays"].items():
      if not boxes.complete(x["shape"], set().union(*[boxes_of.get(name, set()) for boxes_of in table])):
        raise Rejected(f"a part of {name} is damaged or missing in every copy")
    self._log(f"Restoring checkpoint from {self.path(candidate)}.")

    def read(targets: Mapping[str, Any]) -> dict[str, jax.Array]:
      return {name: from_hosts.assemble(self._world, name, x, held.get(name, {}), table) for name, x in targets.items()}

    return verified_load.load(self._world, read, meta["arrays"], abstract), meta

  def _held(self, candidate: Candidate) -> tuple[dict[str, dict[Box, np.ndarray]], dict[str, Any]]:
    """({array: {box: data, mapped from the file}} of the undamaged parts on this host, meta or {})."""
    held: dict[str, dict[Box, np.ndarray]] = {}
    meta: dict[str, Any] = {}
    for entry in self._read_entries():
      if (entry["meta"]["step"], entry["digest"]) != (candidate.step, candidate.copy):
        continue
      damaged = []
      for part in entry["parts"]:
        dtype = jnp.dtype(entry["meta"]["arrays"][part["array"]]["dtype"])
        box = _box(part["box"])
        data = _map(entry["file"], part["offset"], boxes.volume(box) * dtype.itemsize)
        if data is None or zlib.crc32(data.data) != part["crc32"]:
          damaged.append(part["array"])
          continue
        shape = [stop - start for start, stop in box]
        held.setdefault(part["array"], {})[box] = data.view(dtype).reshape(shape)
        meta = entry["meta"]
      if damaged:
        self._log(f"Emergency checkpoint {entry['file']} is damaged: {len(damaged)} parts, the first of {damaged[0]}.")
        self._emit("checkpoint_rejected", step=candidate.step, tier="emergency", reason=f"{damaged[0]} is damaged")
    return held, meta


def _check_entry(entry: Mapping[str, Any]) -> None:
  """Raises Rejected if the index of a copy lacks what a restore reads."""
  if missing := [key for key in ("run", "digest", "meta", "parts") if key not in entry]:
    raise Rejected(f"it lacks {', '.join(missing)}")
  check_meta(entry["meta"])


def _box(value: Any) -> Box:
  return tuple((start, stop) for start, stop in value)


def _map(path: Path, offset: int, size: int) -> np.ndarray | None:
  """`size` bytes of the file from `offset`, mapped into memory; None if the file is shorter."""
  try:
    if not path.is_file() or path.stat().st_size < offset + size:
      return None
    return np.memmap(path, np.uint8, "r", offset, (size,)) if size else np.empty(0, np.uint8)
  except OSError:
    return None
