"""Documents in a column of Arrow data, of Parquet and Hugging Face datasets: texts, token ids, or conversations."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from input_pipeline import conversations
from input_pipeline.documents import BadRecord, Conversation, Document, Piece
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


def documents(batch: Any, names: Sequence[str], place: str, first: int = 0) -> Iterator[Document | BadRecord]:
  """Yields the documents of a record batch, without nulls. names: of `find`. place, first (number of the first row
  there): for messages.

  Raises ConfigError if they are neither texts, lists of integers, nor lists of messages. A column of nulls may have any
  type.
  """
  values = batch.column(names[0])
  for name in names[1:]:
    values = values.flatten()[values.type.get_field_index(name)]  # null where the column above it is null
  column, types = ".".join(names), importlib.import_module("pyarrow.types")
  kind = values.type
  while types.is_dictionary(kind) or types.is_run_end_encoded(kind):  # a categorical column of pandas, for example
    kind = kind.value_type
  if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
    # Not drop_null: Arrow has none for the types that end in _view, and encoded values hide their nulls.
    yield from (text for text in values.to_pylist() if text is not None)
  elif _is_list(types, kind) and (types.is_integer(kind.value_type) or types.is_null(kind.value_type)):
    yield from _lists(types, values, kind.value_type, f"{place}: a list of column {column}")
  elif _is_list(types, kind) and types.is_struct(kind.value_type):
    beside = _beside(batch)
    for number, (record, others) in enumerate(zip(values.to_pylist(), beside), first):
      if record is not None:
        yield _conversation(record, others, f"row {number} of {place}")
  elif any(value.as_py() is not None for value in values):
    raise ConfigError(
      f"train_data_columns={column}: in {place} it has the type {kind}. Choose a column of strings, of lists of "
      "integers (token ids), or of lists of messages with role and content."
    )


def _is_list(types: Any, kind: Any) -> bool:
  of_plain = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
  return of_plain or types.is_list_view(kind) or types.is_large_list_view(kind)


def _conversation(record: list[Any], beside: dict[str, Any], place: str) -> Conversation | BadRecord:
  try:
    return conversations.parse(record, beside)
  except ValueError as error:
    return BadRecord(f"{place}: {error}.")


def beside(schema: Any) -> list[str]:
  """The columns that matter to conversations in another column."""
  return sorted(conversations.BESIDE & set(schema.names))


def _beside(batch: Any) -> list[dict[str, Any]]:
  """The values of `beside` in each row."""
  known = {name: batch.column(name).to_pylist() for name in beside(batch.schema)}
  return [{name: column[row] for name, column in known.items()} for row in range(len(batch))]


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
