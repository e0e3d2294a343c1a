"""Documents of Parquet files: one column, read by row group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from trainer.config.errors import ConfigError
from trainer.data import packages
from trainer.data.documents import Document, Piece

_ROWS = 1024  # that are decoded at a time


def read(piece: Piece, column: str) -> Iterator[Document]:
  """Yields the values of `column`: texts, or lists of token ids. Skips nulls.

  Raises ConfigError if the file cannot be read, or has no such column of strings or lists of integers.
  """
  arrow = packages.load("pyarrow", package="pyarrow", extra="arrow", reason="grain_file_type=parquet")
  parquet = packages.load("pyarrow.parquet", package="pyarrow", extra="arrow", reason="grain_file_type=parquet")
  try:
    with parquet.ParquetFile(piece.path) as file:
      is_text = _is_text(arrow, file.schema_arrow, piece, column)
      for batch in file.iter_batches(batch_size=_ROWS, columns=[column]):
        values = batch.column(0).drop_null()
        yield from values.to_pylist() if is_text else _lists(values, piece, column)
  except (OSError, arrow.ArrowException) as error:
    raise ConfigError(f"{piece.path} cannot be read as Parquet ({error}). Fix or remove it.") from error


def _is_text(arrow: Any, schema: Any, piece: Piece, column: str) -> bool:
  """Whether the column has texts, and not lists of integers. Raises ConfigError if it has neither or is absent."""
  if column not in schema.names:
    raise ConfigError(
      f"train_data_columns={column}: {piece.path} has no such column. Choose one of {', '.join(schema.names)}."
    )
  kind, types = schema.field(column).type, arrow.types
  if types.is_string(kind) or types.is_large_string(kind):
    return True
  is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
  if is_list and types.is_integer(kind.value_type):
    return False
  raise ConfigError(
    f"train_data_columns={column}: in {piece.path} it has the type {kind}. Choose a column of strings, or of lists of "
    "integers (token ids)."
  )


def _lists(values: Any, piece: Piece, column: str) -> Iterator[np.ndarray]:
  """Yields the lists of an Arrow array as arrays of integers."""
  tokens = values.flatten()
  if tokens.null_count:
    raise ConfigError(f"{piece.path}: a list of column {column} contains a null. Give lists of integers.")
  lengths = values.value_lengths().to_numpy(zero_copy_only=False)
  return iter(np.split(tokens.to_numpy(zero_copy_only=False), np.cumsum(lengths)[:-1]) if len(lengths) else [])
