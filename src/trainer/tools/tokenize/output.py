"""The output folder: files of records, the state of unfinished work, and the manifest of finished work."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from input_pipeline.documents import Piece
from input_pipeline.locks import locked
from input_pipeline.tokenizer import BpeTokenizer, Tokenizer
from trainer.config.errors import ConfigError

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
_STATE = ".unfinished"  # a folder: the plan, and a file with the counts of each part that is complete
_PLAN = "plan.json"
_COUNTED = ("documents", "tokens", "records", "targets", "bad_records", "bytes")


@dataclasses.dataclass(frozen=True)
class Part:
  """Some input that becomes one output file."""

  split: str
  number: int
  pieces: tuple[Piece, ...]

  @property
  def size(self) -> int:
    return sum(piece.size for piece in self.pieces)


class Output:
  """The folder that the tool writes. Files appear whole, by renaming, so that a kill at any moment is harmless."""

  def __init__(self, folder: Path, parts: Sequence[Part]) -> None:
    self.folder, self._parts = folder, parts
    self._state = folder / _STATE

  @contextlib.contextmanager
  def locked(self) -> Iterator[None]:
    """Creates the folder and locks it. The lock ends with the process. Raises ConfigError if another process has it."""
    try:
      self.folder.mkdir(parents=True, exist_ok=True)
      descriptor = os.open(self.folder, os.O_RDONLY)
    except OSError as error:
      raise ConfigError(f"--output={self.folder} cannot be written ({error.strerror}). Give another folder.") from error
    try:
      held = locked(descriptor, shared=False)
      if held is False:
        raise ConfigError(f"Another process writes to {self.folder}. Wait for its end, or give another folder.")
      if held is None:
        print(f"The file system of {self.folder} has no locks (flock): make sure that no other process writes there.")
      yield
    finally:
      os.close(descriptor)

  def begin(self, plan: dict[str, Any], tokenizer: Tokenizer | None) -> None:
    """Records what will be written, or checks that the folder has the same.

    Raises ConfigError if the folder has the output of other input, keys or versions, or other files.
    """
    known = self._read(self.folder / MANIFEST) or self._read(self._state / _PLAN)
    if known is not None:
      known = {name: value for name, value in known.items() if name in plan}
      if known != plan:
        raise ConfigError(
          f"{self.folder} has the output of another command or of other files (there -> now):\n"
          + "\n".join(_differences("", known, plan))
          + "\nGive another folder, or remove this one."
        )
    elif others := sorted(path.name for path in self.folder.iterdir() if path.name != _STATE):
      raise ConfigError(f"{self.folder} is not empty: it has {others[0]}. Give a new folder.")
    else:
      self._state.mkdir(exist_ok=True)
      _write(self._state / _PLAN, plan)
    for unfinished in self.folder.glob("*/.part-*"):  # of processes that were killed
      unfinished.unlink(missing_ok=True)
    for split in plan["inputs"]:
      (self.folder / split).mkdir(exist_ok=True)
    if isinstance(tokenizer, BpeTokenizer):
      _write_bytes(self.folder / TOKENIZER, tokenizer.json_text.encode())

  def path(self, part: Part) -> Path:
    count = sum(other.split == part.split for other in self._parts)
    return self.folder / part.split / f"part-{part.number:05}-of-{count:05}.array_record"

  def has(self, part: Part) -> bool:
    """Whether the part is complete: its file has the recorded size."""
    known, path = self._known(part), self.path(part)
    return known is not None and path.is_file() and path.stat().st_size == known["bytes"]

  def hashes(self, part: Part) -> list[str]:
    """The hashes of the documents of the pieces of a complete part."""
    known = self._known(part)
    assert known is not None, part
    return hashes_of(known)

  def finish(self, part: Part, counts: dict[str, Any]) -> None:
    """Records that the file of a part is complete."""
    _write(self._counts_of(part), counts)

  def require_few_bad(self, limit: int) -> None:
    """Raises ConfigError if the complete parts of a split have more than `limit` bad records."""
    for split in dict.fromkeys(part.split for part in self._parts):
      known = [known for part in self._parts if part.split == split and (known := self._known(part)) is not None]
      count = sum(counts["bad_records"] for counts in known)
      if count > limit:
        first = next(message for counts in known for message in counts["bad"])
        raise ConfigError(
          f"{split} has {count} bad records, and max_bad_records={limit}. The first: {first}\n"
          f"Fix the file, or set max_bad_records to at least {count} to skip them."
        )

  def conclude(self) -> dict[str, dict[str, int]]:
    """Writes the manifest, if it is absent, and removes what only a restart needs. Returns the totals of each split."""
    if (manifest := self._read(self.folder / MANIFEST)) is None:
      plan = self._read(self._state / _PLAN)
      assert plan is not None, "begin has written the plan"
      done: dict[str, list[dict[str, Any]]] = {split: [] for split in plan["inputs"]}
      for part in self._parts:
        counts = self._known(part)
        assert counts is not None, part
        done[part.split].append(counts)
      totals = {split: {key: sum(file[key] for file in files) for key in _COUNTED} for split, files in done.items()}
      manifest = plan | {"totals": totals, "files": done}
      _write(self.folder / MANIFEST, manifest)
    shutil.rmtree(self._state, ignore_errors=True)
    return manifest["totals"]

  def _known(self, part: Part) -> dict[str, Any] | None:
    """The counts of a part that was recorded as complete."""
    if (manifest := self._read(self.folder / MANIFEST)) is not None:
      return manifest["files"][part.split][part.number]
    return self._read(self._counts_of(part))

  def _counts_of(self, part: Part) -> Path:
    return self._state / f"{part.split}-{part.number:05}.json"

  def _read(self, path: Path) -> dict[str, Any] | None:
    """The JSON of a file; None if it is absent. Raises ConfigError if it is damaged."""
    try:
      return json.loads(path.read_text())
    except FileNotFoundError:
      return None
    except (OSError, ValueError) as error:
      raise ConfigError(f"{path} cannot be read ({error}). Remove {self.folder}, or give another folder.") from error


def hashes_of(counts: Mapping[str, Any]) -> list[str]:
  """The hashes of the documents of the pieces, in the counts of a part."""
  return [piece["sha256_of_documents"] for piece in counts["inputs"]]


def _write(path: Path, value: dict[str, Any]) -> None:
  _write_bytes(path, json.dumps(value, indent=1).encode())


def _write_bytes(path: Path, data: bytes) -> None:
  """Writes a whole file, also if the machine stops."""
  new = path.with_name(f".{path.name}.new")
  with new.open("wb") as file:
    file.write(data)
    file.flush()
    os.fsync(file.fileno())
  new.rename(path)


def _differences(name: str, old: Any, new: Any) -> Iterator[str]:
  """Yields a line for each value that differs between two JSON values."""
  if isinstance(old, dict) and isinstance(new, dict):
    for key in sorted({*old, *new}):
      yield from _differences(f"{name}.{key}".lstrip("."), old.get(key), new.get(key))
  elif old != new:
    yield f"  {name}: {old} -> {new}"
