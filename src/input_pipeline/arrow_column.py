"""Documents in a column of Arrow data, of Parquet and Hugging Face datasets: texts, token ids, or conversations."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from input_pipeline import record
from input_pipeline.documents import BadRecord, Document, Piece
from input_pipeline.input_errors import ConfigError


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


def documents(batch: Any, names: Sequence[str], place: str, first: int = 0) -> Iterator[Document | BadRecord]:
  """Yields the documents of a record batch, without nulls. names: of `find`. place, first (number of the first row
  there): for messages.

  Raises ConfigError if they are neither texts, lists of integers, nor lists of messages. A column of nulls may have any
  type.
  """
  values = _values(batch, names)
  column, types = ".".join(names), importlib.import_module("pyarrow.types")
  kind = values.type
  while types.is_dictionary(kind) or types.is_run_end_encoded(kind):  # a categorical column of pandas, for example
    kind = kind.value_type
  if not (_is_text(types, kind) or (_is_list(types, kind) and _has_documents(types, kind.value_type))):
    if any(value.as_py() is not None for value in values):
      raise ConfigError(
        f"train_data_columns={column}: in {place} it has the type {kind}. Choose a column of strings, of lists of "
        "integers (token ids), or of lists of messages with role and content."
      )
    return
  others = beside(batch.schema, names)
  if not others and _is_text(types, kind):
    # Not drop_null: Arrow has none for the types that end in _view, and encoded values hide their nulls.
    yield from (text for text in values.to_pylist() if text is not None)
  elif not others and not types.is_struct(kind.value_type):
    yield from _lists(types, values, kind.value_type, f"{place}: a list of column {column}")
  else:
    columns = {path[-1]: _values(batch, path).to_pylist() for path in others}
    for number, one in enumerate(values.to_pylist()):
      if one is not None:
        fields = {name: column[number] for name, column in columns.items()}
        yield _document(one, fields, f"row {first + number} of {place}")


def _is_text(types: Any, kind: Any) -> bool:
  return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)


def _is_list(types: Any, kind: Any) -> bool:
  of_plain = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
  return of_plain or types.is_list_view(kind) or types.is_large_list_view(kind)


def _has_documents(types: Any, value: Any) -> bool:
  """Whether lists of a type can be token ids or messages."""
  return types.is_integer(value) or types.is_null(value) or types.is_struct(value)


def _document(found: Any, fields: dict[str, Any], place: str) -> Document | BadRecord:
  try:
    return record.of_value(found, fields)
  except ValueError as error:
    return BadRecord(f"{place}: {error}.")


def beside(schema: Any, names: Sequence[str]) -> list[list[str]]:
  """The columns beside a column that say what of its documents is trained, or would be lost. names: of `find`."""
  types, fields = importlib.import_module("pyarrow.types"), list(schema)
  for name in names[:-1]:
    fields = _fields(types, next(field for field in fields if field.name == name))
  kind = next((field.type for field in fields if field.name == names[-1]), None) if names else None
  wanted = record.BESIDE if kind is not None and _is_list(types, kind) else record.BESIDE_TEXT
  return [[*names[:-1], field.name] for field in fields if field.name in wanted and field.name not in names[-1:]]


def _values(batch: Any, names: Sequence[str]) -> Any:
  """The values of a column, or of a field of a nested column: null where the column above it is null."""
  values = batch.column(names[0])
  for name in names[1:]:
    values = values.flatten()[values.type.get_field_index(name)]
  return values


def _lists(types: Any, values: Any, token: Any, place: str) -> Iterator[np.ndarray | BadRecord]:
  """Yields the lists of an Arrow array as arrays of integers, without nulls. token: their type. place: for messages."""
  if types.is_list(values.type) or types.is_large_list(values.type) or types.is_fixed_size_list(values.type):
    values = values.drop_null()
    tokens = values.flatten()
    if len(values) and not tokens.null_count:
      lengths = values.value_lengths().to_numpy(zero_copy_only=False)
      yield from np.split(tokens.to_numpy(zero_copy_only=False), np.cumsum(lengths)[:-1])
      return
  for one in values.to_pylist():
    if one is not None:
      is_bad = any(number is None for number in one)
      message = f"{place} contains a null. Give lists of integers."
      yield BadRecord(message) if is_bad else np.array(one, token.to_pandas_dtype())
