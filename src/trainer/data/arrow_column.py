"""Documents in a column of Arrow data: strings, or lists of token ids. For Parquet and Hugging Face datasets."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from trainer.config.errors import ConfigError
from trainer.data.documents import BadRecord, Document, Piece


def is_text(schema: Any, piece: Piece, column: str) -> bool:
  """Whether the column has texts, and not lists of integers. Raises ConfigError if it has neither or is absent."""
  if column not in schema.names:
    raise ConfigError(
      f"train_data_columns={column}: {piece.path} has no such column. Choose one of {', '.join(schema.names)}."
    )
  if schema.names.count(column) > 1:
    raise ConfigError(f"train_data_columns={column}: {piece.path} has several columns with this name. Rename one.")
  types = importlib.import_module("pyarrow.types")
  kind = schema.field(column).type
  if types.is_dictionary(kind):  # how pandas saves a categorical column
    kind = kind.value_type
  if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
    return True
  is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
  if is_list and types.is_integer(kind.value_type):
    return False
  raise ConfigError(
    f"train_data_columns={column}: in {piece.path} it has the type {kind}. Choose a column of strings, or of lists of "
    "integers (token ids)."
  )


def documents(values: Any, is_text: bool, place: str, column: str) -> Iterator[Document | BadRecord]:
  """Yields the documents in a column of a record batch, without nulls. `place`: for messages."""
  values = values.drop_null()
  yield from values.to_pylist() if is_text else _lists(values, place, column)


def _lists(values: Any, place: str, column: str) -> Iterator[np.ndarray | BadRecord]:
  """Yields the lists of an Arrow array as arrays of integers. `place`: for messages."""
  tokens = values.flatten()
  if tokens.null_count:
    for one in values.to_pylist():
      is_bad = any(token is None for token in one)
      message = f"{place}: a list of column {column} contains a null. Give lists of integers."
      yield BadRecord(message) if is_bad else np.array(one, np.int64)
    return
  lengths = values.value_lengths().to_numpy(zero_copy_only=False)
  yield from (np.split(tokens.to_numpy(zero_copy_only=False), np.cumsum(lengths)[:-1]) if len(lengths) else [])
