"""Documents in a column of Arrow data: strings, or lists of token ids. For Parquet and Hugging Face datasets."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from input_pipeline.documents import BadRecord, Document, Piece
from input_pipeline.errors import ConfigError


def find(schema: Any, piece: Piece, column: str) -> list[str]:
  """The names that lead to `column`: a column, or a field of a nested column as in `meta.text`.

  They end at a column of the type null. Raises ConfigError if there is no such column.
  """
  types = importlib.import_module("pyarrow.types")
  fields, left, found = list(schema), column, []
  while left:
    names = [field.name for field in fields]
    name, _, left = (left, "", "") if left in names else left.partition(".")
    if names.count(name) > 1:
      raise ConfigError(f"train_data_columns={column}: {piece.path} has several columns with this name. Rename one.")
    if name not in names:
      nested = [f"{top.name}.{field.name}" for top in schema for field in _fields(types, top)]
      known = ", ".join([*schema.names, *nested])
      raise ConfigError(f"train_data_columns={column}: {piece.path} has no such column. Choose one of {known}.")
    found.append(name)
    field = fields[names.index(name)]
    if types.is_null(field.type):  # of a part in which all values are null, so that nothing is known below it
      break
    fields = _fields(types, field)
  return found


def _fields(types: Any, field: Any) -> list[Any]:
  """The fields of a nested column; [] of another column."""
  return list(field.type) if types.is_struct(field.type) else []


def documents(batch: Any, names: Sequence[str], place: str) -> Iterator[Document | BadRecord]:
  """Yields the documents of a record batch, without nulls. names: of `find`. place: for messages.

  Raises ConfigError if they are neither texts nor lists of integers. A column of nulls may have any type.
  """
  values = batch.column(names[0])
  for name in names[1:]:
    values = values.flatten()[values.type.get_field_index(name)]  # null where the column above it is null
  values = values.drop_null()
  if not len(values):
    return
  column, types = ".".join(names), importlib.import_module("pyarrow.types")
  kind = values.type.value_type if types.is_dictionary(values.type) else values.type  # pandas' categorical column
  is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
  if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
    yield from values.to_pylist()
  elif is_list and (types.is_integer(kind.value_type) or types.is_null(kind.value_type)):  # null: all lists are empty
    yield from _lists(values, place, column)
  else:
    raise ConfigError(
      f"train_data_columns={column}: in {place} it has the type {kind}. Choose a column of strings, or of lists of "
      "integers (token ids)."
    )


def _lists(values: Any, place: str, column: str) -> Iterator[np.ndarray | BadRecord]:
  """Yields the lists of an Arrow array, one or more, as arrays of integers. `place`: for messages."""
  tokens = values.flatten()
  if tokens.null_count:
    for one in values.to_pylist():
      is_bad = any(token is None for token in one)
      message = f"{place}: a list of column {column} contains a null. Give lists of integers."
      yield BadRecord(message) if is_bad else np.array(one, np.int64)
    return
  lengths = values.value_lengths().to_numpy(zero_copy_only=False)
  yield from np.split(tokens.to_numpy(zero_copy_only=False), np.cumsum(lengths)[:-1])
