"""Documents of ArrayRecord files. A record is a tf.train.Example, UTF-8 text, or little-endian token ids."""

from __future__ import annotations

import contextlib
import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from input_pipeline import packages, tf_example, windows
from input_pipeline.data_files import File
from input_pipeline.documents import BadRecord, Document, Piece
from input_pipeline.input_errors import ConfigError
from input_pipeline.open_files import LastUsed

X = TypeVar("X")


def read(piece: Piece, file_type: str, column: str) -> Iterator[Document | BadRecord]:
  """Yields the documents of a file. `file_type` is a value of grain_file_type; `column` names a feature of an Example.

  A record that cannot be read, or has another format, is bad. Raises ConfigError if the file cannot be opened.
  """
  return scan(piece, decoder(file_type, column))


def scan(piece: Piece, decode: Callable[[bytes], X]) -> Iterator[X | BadRecord]:
  """Yields each record of a file, decoded. `decode` raises ValueError for a bad record."""
  total = count(piece)
  number = 0
  while number < total:
    reader = _reader(piece.path)  # opened again after each damaged record: a reader that failed once is useless
    try:
      reader.seek(number)
      for number in range(number, total):  # noqa: B020 (continues after a damaged record)
        record = reader.read()
        try:
          found: X | BadRecord = decode(record)
        except ValueError as error:  # UnicodeDecodeError is one
          found = BadRecord(f"record {number} of {piece.path}: {error}.")
        yield found
      reader.close()
    except (RuntimeError, IndexError) as error:
      with contextlib.suppress(RuntimeError):  # it raises the same error again
        reader.close()
      yield BadRecord(f"record {number} of {piece.path} cannot be read ({error}). Fix or remove the file.")
    number += 1


def decoder(file_type: str, column: str) -> Callable[[bytes], Document]:
  """The function that makes a document of a record. It raises ValueError for a record of another format."""
  decoders: dict[str, Callable[[bytes], Document]] = {
    "arrayrecord": partial(tf_example.document, name=column),
    "arrayrecord_text": lambda record: record.decode("utf-8"),
    "arrayrecord_uint16": lambda record: np.frombuffer(record, "<u2"),
    "arrayrecord_int32": lambda record: np.frombuffer(record, "<i4"),
    "arrayrecord_windows": lambda record: windows.unpack(record, np.dtype("<i4")).tokens,
  }
  return decoders[file_type]


def count(piece: Piece) -> int:
  """Number of records of a file. Raises ConfigError if it cannot be read."""
  try:
    reader = _reader(piece.path)
    try:
      return reader.num_records()
    finally:
      reader.close()
  except RuntimeError as error:
    raise ConfigError(
      f"{piece.path} cannot be read as ArrayRecord ({error}). Fix or remove it, or set grain_file_type."
    ) from error


class Records:
  """The records of several files by number. Thread safe. The last used files are open.

  grain's ArrayRecordDataSource needs more time per record the more records a file has (6 ms at a million). A seek needs
  microseconds, and opening a file 0.7 ms. An open file needs 8 bytes of memory per record.
  """

  def __init__(self, paths: Sequence[File], counts: Sequence[int]) -> None:
    """`counts`: number of records of each file."""
    self._paths = paths
    self._starts = [0, *itertools.accumulate(counts)]
    self._readers: list[LastUsed[Any]] = [LastUsed(partial(_reader, path)) for path in paths]

  def __len__(self) -> int:
    return self._starts[-1]

  def __getitem__(self, number: int) -> bytes:
    """Raises OSError, naming record and file, if the record cannot be read or is damaged."""
    file = bisect_right(self._starts, number) - 1
    try:
      with self._readers[file].opened() as reader:
        reader.seek(number - self._starts[file])
        return reader.read()
    except (RuntimeError, IndexError) as error:
      raise OSError(f"{self.place(number)} cannot be read: {error!r}") from error

  def place(self, number: int) -> str:
    """Record and file of a number, for messages."""
    file = bisect_right(self._starts, number) - 1
    return f"record {number - self._starts[file]} of {self._paths[file]}"

  def close(self) -> None:
    """Closes the files. Idempotent."""
    for reader in self._readers:
      reader.close()


def _reader(path: File) -> Any:
  """A reader without threads that read ahead: the file system does that. Raises RuntimeError if it cannot be opened."""
  return packages.array_record().ArrayRecordReader(str(path), "readahead_buffer_size:0,max_parallelism:0")
