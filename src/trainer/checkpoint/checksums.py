"""Small JSON files that notice when a bit of them has changed, and the checksums of all files of a checkpoint."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

from trainer.checkpoint.errors import Rejected

BLOCK = 4 << 20  # bytes read at once


def dump(value: Any) -> bytes:
  """A line with the CRC-32 of the rest, then JSON."""
  body = json.dumps(value, indent=1, sort_keys=True).encode()
  return b"%08x\n" % zlib.crc32(body) + body


def parse(data: bytes, name: str) -> Any:
  """The value that `dump` wrote. Raises Rejected where the bytes are not as written."""
  head, _, body = data.partition(b"\n")
  if head != b"%08x" % zlib.crc32(body):
    raise Rejected(f"{name} is damaged: its checksum does not match")
  return json.loads(body)


def file_crc(path: Any) -> tuple[int, int]:
  """(bytes, CRC-32) of a file, read in blocks."""
  size, crc = 0, 0
  with path.open("rb") as file:
    while block := file.read(BLOCK):
      size += len(block)
      crc = zlib.crc32(block, crc)
  return size, crc


def walk(root: Any, prefix: str = "") -> Iterable[str]:
  """Relative names of all files below an epath, sorted."""
  for child in sorted(root.iterdir(), key=lambda p: p.name):
    if child.is_dir():
      yield from walk(child, f"{prefix}{child.name}/")
    else:
      yield prefix + child.name


def manifest(root: Any, skip: frozenset[str], crc_limit: int | None) -> dict[str, dict[str, int]]:
  """{relative name: {"bytes", "crc32"}} of the files below root; files above crc_limit bytes get only their size."""
  entries = {}
  for name in walk(root):
    if name in skip:
      continue
    path = root / name
    if crc_limit is not None and (size := path.stat().length) > crc_limit:
      entries[name] = {"bytes": size}
    else:
      size, crc = file_crc(path)
      entries[name] = {"bytes": size, "crc32": crc}
  return entries


def check(root: Any, entries: Mapping[str, Mapping[str, int]]) -> None:
  """Raises Rejected, naming the file, where one is missing or not as the manifest says."""
  for name, entry in entries.items():
    path = root / name
    if not path.exists():
      raise Rejected(f"{name} is missing")
    size = path.stat().length
    if size != entry["bytes"]:
      raise Rejected(f"{name} has {size} bytes instead of {entry['bytes']}")
    if "crc32" in entry and file_crc(path)[1] != entry["crc32"]:
      raise Rejected(f"{name} is damaged: its checksum does not match")
