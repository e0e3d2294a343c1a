"""Documents of JSONL files: one JSON object per line. Plain, or compressed with gzip or zstd."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

import numpy as np

from input_pipeline import conversations, first_bytes, packages, storage
from input_pipeline.documents import BadRecord, Document, Piece, cut_at_lines, line_number
from input_pipeline.errors import ConfigError

_COMPRESSED = (".gz", ".zst")
ABSENT = object()


def read(piece: Piece, column: str) -> Iterator[Document | BadRecord]:
  """Yields the field `column` of each line of a file: a text, token ids, or a conversation. Skips blank lines.

  A line without such a field is a bad record. Raises ConfigError with file and line if the file cannot be read.
  """
  number = 0
  try:
    with _opened(piece) as file:
      for number, line in enumerate(lines(file, piece), 1):
        if line.strip():
          yield _document(piece, number, line, column)
  except (OSError, EOFError, zlib.error) as error:
    storage.raise_outage("read", piece.path, error)
    raise ConfigError(f"{piece.path} cannot be read after line {number} ({error}). Fix or remove it.") from error


def _document(piece: Piece, number: int, line: bytes, column: str) -> Document | BadRecord:
  """The document in a line of a piece. `number`: of the line, from 1."""
  try:
    return value(line, column)
  except conversations.ConversationError as error:
    number += line_number(piece.path, piece.start) - 1 if piece.start else 0
    return BadRecord(f"{piece.path}:{number}: {error}.")
  except ValueError as error:
    if number == 1 and not piece.start and (known := first_bytes.problem(line[:512], lines=True)):
      return BadRecord(f"{piece.path} cannot be read as JSONL. {known}.")
    number += line_number(piece.path, piece.start) - 1 if piece.start else 0
    remedy = f'Every line must be like {{"{column}": "..."}}, {{"{column}": [1, 2, 3]}} or'
    remedy += (
      f' {{"{column}": [{{"role": "user", "content": "..."}}]}}. Set train_data_columns to the name of the field.'
    )
    return BadRecord(f"{piece.path}:{number}: {error}. {remedy}")


def cut(piece: Piece, limit: int) -> list[Piece]:
  """Parts of about `limit` bytes with whole lines. A compressed file stays whole, because it is read from its start."""
  return [piece] if _suffix(piece) in _COMPRESSED else cut_at_lines(piece, limit)


def lines(file: BinaryIO, piece: Piece) -> Iterator[bytes]:
  """Yields the lines of the piece."""
  if _suffix(piece) in _COMPRESSED:
    yield from file
    return
  file.seek(piece.start)
  place = piece.start
  while place < piece.stop and (line := file.readline()):
    place += len(line)
    yield line


def value(line: bytes, column: str) -> Document:
  """The text, the token ids as int64, or the conversation in the field `column` of a line of JSON, or in nested fields
  (`meta.text`).

  A null is an empty text. Raises ValueError if there is no such field, or it has another type.
  """
  try:
    record = json.loads(line)
  except RecursionError:
    raise ValueError("nested too deep") from None
  found, beside = field(record, column), _beside(record, column)
  if found is None:
    return ""
  if isinstance(found, str):
    return found
  if isinstance(found, list) and all(type(token) is int and abs(token) < 2**62 for token in found):
    return np.array(found, np.int64)
  if isinstance(found, list) and any(isinstance(part, dict) for part in found):
    return conversations.parse(found, beside)
  raise ValueError(f'no field "{column}" with a string, a list of integers or a list of messages')


def field(record: Any, column: str) -> Any:
  """The value of the field `column`, or of nested fields; None below a null; ABSENT without such a field."""
  if not isinstance(record, dict):
    return ABSENT
  if column in record:
    return record[column]
  head, _, rest = column.partition(".")
  if not rest or head not in record:
    return ABSENT
  return None if record[head] is None else field(record[head], rest)


def _beside(record: Any, column: str) -> dict[str, Any]:
  """The mapping that has the field `column`."""
  if isinstance(record, dict) and column not in record and "." in column:
    head, _, rest = column.partition(".")
    return _beside(record.get(head), rest)
  return record if isinstance(record, dict) else {}


def _suffix(piece: Piece) -> str:
  return piece.path.suffix.lower()


@contextmanager
def _opened(piece: Piece) -> Iterator[BinaryIO]:
  """The file of the piece, decompressed."""
  with piece.path.open("rb") as file:
    match _suffix(piece):
      case ".gz":
        with gzip.open(file) as content:
          yield cast(BinaryIO, content)
      case ".zst":
        pyarrow = packages.load("pyarrow", package="pyarrow", extra="arrow", reason=f"{piece.path} (zstd)")
        with pyarrow.CompressedInputStream(file, "zstd") as stream:
          yield io.BufferedReader(stream, 2**20)
      case _:
        yield file
