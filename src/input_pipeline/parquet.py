"""Documents of Parquet files: one column, read by row group."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from input_pipeline import arrow_column, packages, storage
from input_pipeline.documents import BadRecord, Document, Piece
from input_pipeline.input_errors import ConfigError

_ROWS = 1024  # that are decoded at a time


def read(piece: Piece, column: str) -> Iterator[Document | BadRecord]:
  """Yields the values of `column`: texts, or lists of token ids. Skips nulls.

  Lists with nulls, and the rest of a row group that cannot be read, are bad records. Raises ConfigError if the file
  cannot be opened, or has rows but no such column of strings or lists of integers.
  """
  arrow = packages.load("pyarrow", package="pyarrow", extra="arrow", reason="grain_file_type=parquet")
  parquet = packages.load("pyarrow.parquet", package="pyarrow", extra="arrow", reason="grain_file_type=parquet")
  try:
    with piece.path.open("rb") as content, parquet.ParquetFile(content) as file:
      # A file without rows may have any columns: programs write one for a shard from which all rows were removed.
      names = arrow_column.find(file.schema_arrow, piece, column) if file.metadata.num_rows else []
      for group, start in enumerate(_row_groups(file)):
        if piece.start <= start < piece.stop:
          yield from _documents(arrow, file, group, piece, names)
  except (OSError, arrow.ArrowException) as error:
    storage.raise_outage("read", piece.path, error)
    raise ConfigError(f"{piece.path} cannot be read as Parquet ({error}). Fix or remove it.") from error


def _documents(arrow: Any, file: Any, group: int, piece: Piece, names: list[str]) -> Iterator[Document | BadRecord]:
  rows = 0
  columns = [".".join(path) for path in (names, *arrow_column.beside(file.schema_arrow, names))]
  try:
    for batch in file.iter_batches(batch_size=_ROWS, columns=columns, row_groups=[group]):
      yield from arrow_column.documents(batch, names, f"row group {group} of {piece.path}", rows)
      rows += len(batch)
  except (OSError, UnicodeDecodeError, arrow.ArrowException) as error:
    storage.raise_outage("read", piece.path, error)
    yield BadRecord(
      f"row {rows} of row group {group} of {piece.path} and the rows after it cannot be read "
      f"({' '.join(str(error).split())}). Fix or remove the file.",
      file.metadata.row_group(group).num_rows - rows,
    )


def cut(piece: Piece, limit: int) -> list[Piece]:
  """Parts of about `limit` bytes with whole row groups: a row group belongs to the part in which it begins."""
  parquet = packages.load("pyarrow.parquet", package="pyarrow", extra="arrow", reason="grain_file_type=parquet")
  try:
    with piece.path.open("rb") as content, parquet.ParquetFile(content) as file:
      starts = _row_groups(file)
  except (OSError, ValueError) as error:  # an ArrowInvalid is a ValueError
    storage.raise_outage("read", piece.path, error)
    raise ConfigError(f"{piece.path} cannot be read as Parquet ({error}). Fix or remove it.") from error
  cuts = [piece.start]
  for start in starts[1:]:
    if start - cuts[-1] >= limit:
      cuts.append(start)
  return [replace(piece, start=start, stop=stop) for start, stop in itertools.pairwise([*cuts, piece.stop])]


def _row_groups(file: Any) -> list[int]:
  """The offsets in bytes at which the row groups of an open file begin, ascending; the first one is 0."""
  starts = [0]
  for number in range(1, file.metadata.num_row_groups):
    chunk = file.metadata.row_group(number).column(0)
    starts.append(min(chunk.data_page_offset, chunk.dictionary_page_offset or chunk.data_page_offset))
  return starts[: file.metadata.num_row_groups]
