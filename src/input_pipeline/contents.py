"""The identity of a corpus: hashes of its documents, which are taken while they are read.

Stamps of the files (size, times, inode; the version in an object store) only find hashes that are known. Files with
other stamps are read again: a corpus that was copied or touched keeps its identity, and one that was changed in place
gets another.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from input_pipeline import cache
from input_pipeline.documents import BadRecords, Documents, Piece, naming
from input_pipeline.input_errors import ConfigError

_SETTLED_NS = 2 * 10**9  # a file that was written more recently may change again without another time
_SAMPLES, _SAMPLED = 16, 2**12  # of a file that is read in place: places, bytes at each
_ENDS = 2**16  # bytes at each end of it
_FILE = "value.json"


def hash_of(*parts: Any) -> str:
  """64 hex digits of JSON values."""
  return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def names(documents: Documents) -> list[Any]:
  """What is known of the documents without reading them, as JSON: the same wherever the files are."""
  return [documents.format, [[piece.name, piece.start, piece.stop] for piece in documents.pieces]]


def identity(documents: Documents, hashes: Iterable[str]) -> str:
  """64 hex digits of the documents and their order. hashes: of `Documents.valid`, one of each piece."""
  return hash_of(names(documents), list(hashes))


def read(documents: Documents, max_bad_records: int) -> str:
  """The identity of the documents, which are all read. Raises ConfigError as `Documents.valid`."""
  hashes: list[str] = []
  for _ in documents.valid(BadRecords(max_bad_records), hashes):
    pass
  return identity(documents, hashes)


def read_all(splits: Mapping[str, Documents], max_bad_records: int) -> dict[str, str]:
  """{split: `read` of its documents}."""
  return {split: read(documents, max_bad_records) for split, documents in splits.items()}


class Stamps:
  """The stamps of the files of some documents at one moment."""

  def __init__(self, splits: Iterable[Documents]) -> None:
    """Raises ConfigError if a file is absent or has become shorter."""
    self._settled = True
    self._now = time.time_ns()
    self.key = hash_of([[one.format, *map(self._stamp, one.pieces)] for one in splits])
    """64 hex digits: equal if no file has changed, as far as the stamps show it."""

  def _stamp(self, piece: Piece) -> list[Any]:
    place = [piece.name, str(piece.path), piece.start, piece.stop]
    if not isinstance(piece.path, Path):  # in an object store, or a dataset in Python
      self._settled &= bool(piece.path.version)
      return [*place, piece.path.version]
    with naming(piece.path):
      status = os.stat(piece.path)
    if status.st_size < piece.stop:
      raise ConfigError(
        f"{piece.path} had {piece.stop} bytes and now has {status.st_size}. Start again when no program writes to it."
      )
    self._settled &= max(status.st_mtime_ns, status.st_ctime_ns) < self._now - _SETTLED_NS
    return [*place, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]

  def recall(self, directory: str, what: str) -> Any:
    """The value that `keep` has kept for files with these stamps; None: there is none."""
    return cache.known(directory, self._name(what), _FILE)

  def keep(self, directory: str, what: str, value: Any, log: cache.Log) -> None:
    """Keeps a JSON value that was read from the files. Not if they were written just now."""
    if self._settled:
      try:
        cache.value(directory, self._name(what), _FILE, compute=lambda: value, log=log)
      except ConfigError as error:  # a cache that others have filled may be read only
        log(f"The next start reads the files again: {error}")

  def remembered(self, directory: str, what: str, compute: Callable[[], Any], log: cache.Log) -> Any:
    """The kept value, or the one that `compute` reads from the files, which is kept."""
    value = self.recall(directory, what)
    if value is None:
      value = compute()
      self.keep(directory, what, value, log)
    return value

  def _name(self, what: str) -> str:
    return f"{what}-{self.key[:32]}"


def of_files(pieces: Iterable[Piece]) -> list[list[Any]]:
  """[name, size, hash of samples] of local files that are never read ahead: both ends, and places spread over the file.

  With the hash of the whole file, if trainer.tools.tokenize has written it into manifest.json beside their folder.
  Raises ConfigError if a file cannot be read.
  """
  manifests: dict[Any, dict[str, Any]] = {}
  found = []
  for piece in pieces:
    folder = piece.path.parent  # type: ignore[union-attr]
    if folder not in manifests:
      manifests[folder] = _manifest(folder)
    content = hashlib.sha256()
    with naming(piece.path), piece.path.open("rb") as file:
      step = piece.size // (_SAMPLES + 1)
      for place, size in [(0, _ENDS), *((i * step, _SAMPLED) for i in range(1, _SAMPLES + 1)), (-_ENDS, _ENDS)]:
        file.seek(place if place >= 0 else max(0, piece.size + place))
        content.update(file.read(size))
    found.append([piece.name, piece.size, content.hexdigest(), manifests[folder].get(piece.path.name)])
  return found


def _manifest(folder: Any) -> dict[str, Any]:
  """{name: hash} of the files in `folder` that the manifest of trainer.tools.tokenize has; {} without a manifest."""
  try:
    manifest = json.loads((folder.parent / "manifest.json").read_bytes())
    return {file["file"].rpartition("/")[2]: file["sha256"] for file in manifest["files"][folder.name]}
  except (OSError, ValueError, KeyError, TypeError, AttributeError):  # absent, or of another program
    return {}
