"""The emergency copies in the folder of this host: their files, and the undamaged parts in them.

  {local_checkpoint_directory}/{run}/{id}/{step}.s{slice}.p{process}.bin   the parts of the arrays
  {local_checkpoint_directory}/{run}/{id}/{step}.s{slice}.p{process}.json  what is where, with a CRC-32 each; last
{run} is the run's name and a hash of where the run's folder is, {id} the content of {run}/run_id: runs of the same name
in different folders, or one after the other in the same folder, have no local copies in common.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from input_pipeline.places import Place
from input_pipeline.storage import is_address
from trainer.checkpoint import checksums
from trainer.checkpoint.arrays import boxes
from trainer.checkpoint.arrays.boxes import Box
from trainer.checkpoint.checkpoint_errors import Rejected
from trainer.checkpoint.meta import check_meta
from trainer.checkpoint.state_backup import Candidate

NUMBER = "(0|[1-9][0-9]{0,17})"
ENTRY = re.compile(rf"{NUMBER}\.s{NUMBER}\.p{NUMBER}\.(json|bin)")

Part = tuple[str, Box]  # of an array
Held = dict[str, dict[Box, np.ndarray]]  # {array: {box: its data}}


@dataclass(frozen=True)
class Copy:
  """The copy that one process wrote of its part of one slice at one step."""

  step: int
  slice: int
  process: int

  def path(self, root: Path, kind: str) -> Path:
    return root / f"{self.step}.s{self.slice}.p{self.process}.{kind}"


@dataclass(frozen=True)
class Listed:
  """What an undamaged index says of a copy. Copies of equal candidates are equal bit by bit: their parts can be mixed.

  Candidate.copy is the digest of the fingerprints.
  """

  candidate: Candidate
  shapes: dict[str, list[int]]  # of all arrays of the state
  parts: list[Part]

  def to_json(self) -> list[Any]:
    return [self.candidate.step, self.candidate.copy, self.shapes, self.parts]

  @classmethod
  def from_json(cls, value: Sequence[Any]) -> Listed:
    step, digest, shapes, parts = value
    return cls(Candidate(step, digest), shapes, [(name, box_of(box)) for name, box in parts])


def box_of(value: Any) -> Box:
  return tuple((start, stop) for start, stop in value)


def identity(run_directory: str) -> str:
  """A text that is the same for every spelling of one folder."""
  return run_directory.rstrip("/") if is_address(run_directory) else os.path.realpath(run_directory)


def folder(local_directory: str | Path, run_directory: str) -> Path:
  """Where every host keeps the local copies of the runs in `run_directory`, each run in a folder named by its id."""
  run = identity(run_directory)
  return Path(local_directory).expanduser() / f"{run.rsplit('/', 1)[-1]}-{hashlib.sha256(run.encode()).hexdigest()[:8]}"


class LocalCopies:
  """The copies of one run on this host, of whichever slices and processes."""

  def __init__(self, root: Path, run_id: str) -> None:
    self.root, self._run_id = root, run_id

  def files(self, kind: str) -> list[Copy]:
    """The copies that have a file of this kind ("json" or "bin")."""
    found = [ENTRY.fullmatch(path.name) for path in self.root.iterdir()]
    return [Copy(int(m[1]), int(m[2]), int(m[3])) for m in found if m and m[4] == kind]

  def remove(self, copies: Collection[Copy]) -> None:
    for copy in copies:
      for kind in ("json", "json.tmp", "bin"):  # the json first: without it the bin is not used
        path = copy.path(self.root, kind)
        if path.is_dir() and not path.is_symlink():  # not ours, but a save needs the name
          shutil.rmtree(path)
        else:
          path.unlink(missing_ok=True)

  def listed(self) -> tuple[list[Listed], list[str]]:
    """(the copies with an undamaged index, one line for each damaged one)."""
    entries, damage = self._entries()
    return [
      Listed(
        Candidate(entry["meta"]["step"], entry["digest"]),
        {name: x["shape"] for name, x in entry["meta"]["arrays"].items()},
        [(part["array"], box_of(part["box"])) for part in entry["parts"]],
      )
      for entry in entries
    ], damage

  def _entries(self) -> tuple[list[dict[str, Any]], list[str]]:
    """(the undamaged indices, each with "file", the path of its data; one line for each damaged index)."""
    entries, damage = [], []
    for copy in sorted(self.files("json"), key=lambda c: (c.step, c.slice, c.process)):
      path = copy.path(self.root, "json")
      try:
        entry = checksums.parse(checksums.read(Place(str(path))), path.name)
        if missing := [key for key in ("run", "digest", "meta", "parts") if key not in entry]:
          raise Rejected(f"it lacks {', '.join(missing)}")
        check_meta(entry["meta"])
      except Rejected as reason:
        damage.append(f"Emergency checkpoint {path} is not used: {reason}")
        continue
      if entry["run"] == self._run_id and entry["meta"]["step"] == copy.step:
        entries.append(entry | {"file": copy.path(self.root, "bin")})
    return entries, damage

  def held(self, candidate: Candidate) -> tuple[Held, dict[str, Any], list[str]]:
    """(undamaged parts, mapped from the files; meta, or {} without a part; one line for each damaged file).

    Reads every byte."""
    held: Held = {}
    meta: dict[str, Any] = {}
    damage = []
    for entry in self._entries()[0]:
      if (entry["meta"]["step"], entry["digest"]) != (candidate.step, candidate.copy):
        continue
      damaged = []
      for part in entry["parts"]:
        name, box = part["array"], box_of(part["box"])
        dtype = jnp.dtype(entry["meta"]["arrays"][name]["dtype"])
        data = _map(entry["file"], part["offset"], boxes.volume(box) * dtype.itemsize)
        if data is None or zlib.crc32(data.data) != part["crc32"]:
          damaged.append(name)
          continue
        held.setdefault(name, {})[box] = data.view(dtype).reshape(boxes.shape(box))
        meta = entry["meta"]
      if damaged:
        what = f"{len(damaged)} parts, the first of {damaged[0]}"
        damage.append(f"Emergency checkpoint {entry['file']} is damaged: {what}.")
    return held, meta, damage


def _map(path: Path, offset: int, size: int) -> np.ndarray | None:
  """`size` bytes of the file from `offset`, mapped into memory; None if the file is shorter."""
  try:
    if not path.is_file() or path.stat().st_size < offset + size:
      return None
    return np.memmap(path, np.uint8, "r", offset, (size,)) if size else np.empty(0, np.uint8)
  except OSError:
    return None
