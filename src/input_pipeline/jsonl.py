"""Documents of JSONL files: one JSON object per line. Plain, or compressed with gzip or zstd."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, cast

from input_pipeline import conversations, first_bytes, packages, record, storage
from input_pipeline.documents import BadRecord, Document, Piece, cut_at_lines, line_number
from input_pipeline.input_errors import ConfigError

_COMPRESSED = (".gz", ".zst")


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
    like = ('"..."', "[1, 2, 3]", '[{"role": "user", "content": "..."}]')
    remedy = " or ".join(f'{{"{column}": {one}}}' for one in like)
    return BadRecord(f"{piece.path}:{number}: {error}. Every line must be like {remedy}.")


def cut(piece: Piece, limit: int) -> list[Piece]:
  """Parts of about `limit` bytes with whole lines. A compressed file stays whole, because it is read from its start."""
  return [piece] if _suffix(piece) in _COMPRESSED else cut_at_lines(piece, limit)


def lines(file: BinaryIO, piece: Piece) -> Iterator[bytes]:
  if _suffix(piece) in _COMPRESSED:
    yield from file
    return
  file.seek(piece.start)
  place = piece.start
  while place < piece.stop and (line := file.readline()):
    place += len(line)
    yield line


def value(line: bytes, column: str) -> Document:
  """The document in the field `column` of a line of JSON. Raises ValueError as `record.of_fields`."""
  try:
    return record.of_fields(json.loads(line), column)
  except RecursionError:
    raise ValueError("nested too deep") from None


def _suffix(piece: Piece) -> str:
  return piece.path.suffix.lower()


@contextmanager
def _opened(piece: Piece) -> Iterator[BinaryIO]:
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
