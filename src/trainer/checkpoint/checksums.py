"""JSON files with a checksum in the first line, and the checksums of all files of a checkpoint."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent import futures
from typing import Any

from input_pipeline.places import Place
from input_pipeline.storage import StorageError
from trainer.checkpoint.checkpoint_errors import Rejected

BLOCK = 4 << 20  # bytes read at once


def read(path: Place) -> bytes:
  """The content of a small file. Raises Rejected if it is missing, unreadable or no regular file; see `_readable`."""
  with _readable(path, path.name):
    return path.read_bytes()


@contextlib.contextmanager
def _readable(path: Place, name: str) -> Iterator[None]:
  """Raises Rejected, which calls the file `name`, if it is missing, no regular file, or the block cannot read it.

  A pipe is never opened: reading it would wait for ever. An outage says nothing about the checkpoint: StorageError.
  """
  try:
    if not path.is_remote and path.exists() and not os.path.isfile(path):
      raise Rejected(f"{name} is no regular file")
    yield
  except FileNotFoundError:
    raise Rejected(f"{name} is missing") from None
  except StorageError as error:
    if path.is_remote or error.errno == errno.ESTALE:
      raise
    raise Rejected(f"{name} cannot be read: {error}") from error


def dump(value: Any) -> bytes:
  """Bytes: a line with the CRC-32 of the rest, then the value as JSON."""
  body = json.dumps(value, indent=1, sort_keys=True).encode()
  return b"%08x\n" % zlib.crc32(body) + body


def parse(data: bytes, name: str) -> dict[str, Any]:
  """The dict that `dump` wrote. Raises Rejected if the bytes are not as written."""
  head, _, body = data.partition(b"\n")
  if head != b"%08x" % zlib.crc32(body):
    raise Rejected(f"{name} is damaged: its checksum does not match")
  value = json.loads(body)
  if not isinstance(value, dict):
    raise Rejected(f"{name} holds a {type(value).__name__} instead of a dict")
  return value


def file_crc(path: Place) -> tuple[int, int]:
  """(bytes, CRC-32) of a file, read in blocks."""
  size, crc = 0, 0
  with path.open("rb") as file:
    while block := file.read(BLOCK):
      size += len(block)
      crc = zlib.crc32(block, crc)
  return size, crc


def walk(root: Place, prefix: str = "") -> Iterable[str]:
  """Relative names of all files below a folder, sorted."""
  for child in root.iterdir():
    if child.is_dir():
      yield from walk(child, f"{prefix}{child.name}/")
    else:
      yield prefix + child.name


def manifest(root: Place, skip: frozenset[str], crc_limit: int | None) -> dict[str, dict[str, int]]:
  """{relative name: {"bytes", "crc32"}} of the files below root; files above crc_limit bytes get only their size."""

  def entry(name: str) -> dict[str, int]:
    path = root / name
    if crc_limit is not None and (size := path.stat().size) > crc_limit:
      return {"bytes": size}
    size, crc = file_crc(path)
    return {"bytes": size, "crc32": crc}

  names = [name for name in walk(root) if name not in skip]
  with futures.ThreadPoolExecutor() as pool:
    return dict(zip(names, pool.map(entry, names)))


def check(root: Place, entries: Mapping[str, Mapping[str, int]]) -> None:
  """Raises Rejected, naming the first such file, if a file is missing or not as the manifest says."""

  def check_one(name: str) -> None:
    path, entry = root / name, entries[name]
    with _readable(path, name):
      size = path.stat().size
      if size != entry.get("bytes"):
        raise Rejected(f"{name} has {size} bytes instead of {entry.get('bytes')}")
      if "crc32" in entry and file_crc(path)[1] != entry["crc32"]:
        raise Rejected(f"{name} is damaged: its checksum does not match")

  with futures.ThreadPoolExecutor() as pool:
    list(pool.map(check_one, entries))
