"""Records in a local file, read by number: NAME.records has a checksum after each record, NAME.index has the offsets.

Not ArrayRecord: its reader starts 64 threads per process and keeps the index of every open file in memory. A read here
is two system calls, so the number of open files costs neither threads nor memory.
"""

from __future__ import annotations

import io
import os
import struct
import zlib
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from input_pipeline.open_files import LastUsed

_OFFSET = struct.Struct("<Q")
_RANGE = struct.Struct("<QQ")
_CHECKSUM = struct.Struct("<I")


class Records:
  """The records that `write` wrote. Thread safe. The files are opened when they are read."""

  def __init__(self, path: Path, count: int) -> None:
    """`path`: the file of records; `count`: their number."""
    self._path = path
    self._count = count
    # io.FileIO reads without a buffer.
    self._index, self._data = (LastUsed(partial(io.FileIO, file)) for file in (index_of(path), path))

  def __len__(self) -> int:
    return self._count

  def __getitem__(self, number: int) -> bytes:
    """Raises OSError, naming record and file, if the record cannot be read or is damaged."""
    if not 0 <= number < self._count:
      raise IndexError(number)
    try:
      with self._index.opened() as file:
        start, stop = _RANGE.unpack(os.pread(file.fileno(), _RANGE.size, number * _OFFSET.size))
      with self._data.opened() as file:
        if not start <= stop <= os.fstat(file.fileno()).st_size:
          raise ValueError("its offset is wrong")
        data = os.pread(file.fileno(), stop - start, start)
      if data[-_CHECKSUM.size :] != _checksum(data[: -_CHECKSUM.size]):
        raise ValueError("its checksum is wrong")
    except (OSError, ValueError, struct.error) as error:
      raise OSError(
        f"record {number} of {self._path} cannot be read: {error}. "
        "Delete the folder of this file; the data are then prepared again."
      ) from error
    return data[: -_CHECKSUM.size]

  def close(self) -> None:
    """Closes the files. Idempotent."""
    self._index.close()
    self._data.close()


def index_of(path: Path) -> Path:
  """The file with the offsets of a file of records: count + 1 numbers of 8 bytes."""
  return path.with_suffix(".index")


def write(path: Path, records: Iterable[bytes]) -> int:
  """Returns the number of records, which it writes to `path` and its index. Raises OSError, naming the file."""
  count, place = 0, 0
  try:
    with path.open("wb") as data, index_of(path).open("wb") as index:
      index.write(_OFFSET.pack(0))
      for record in records:
        data.write(record)
        data.write(_checksum(record))
        place += len(record) + _CHECKSUM.size
        index.write(_OFFSET.pack(place))
        count += 1
  except OSError as error:
    raise OSError(f"{path} cannot be written: {error}") from error
  return count


def fault(path: Path, count: int) -> str | None:
  """What is wrong with a file of `count` records, or None. Checks sizes, and the first and the last record.

  Other damaged records are found when they are read. Raises OSError if a file is absent.
  """
  size = path.stat().st_size
  with index_of(path).open("rb") as index:
    index.seek(count * _OFFSET.size)
    if index.read() != _OFFSET.pack(size):
      return f"{path.name} does not hold {count} records in {size} bytes"
  records = Records(path, count)
  try:
    for number in {0, count - 1} if count else set():
      records[number]
  except OSError as error:
    return str(error)
  finally:
    records.close()
  return None


def _checksum(record: bytes) -> bytes:
  return _CHECKSUM.pack(zlib.crc32(record))
