"""Columns of Arrow data in every type that can hold documents."""

from __future__ import annotations

import pytest
from tests.support.data_files import ARROW

from input_pipeline import arrow_column

arrow = pytest.importorskip("pyarrow", reason=ARROW)
compute = pytest.importorskip("pyarrow.compute", reason=ARROW)

IDS = [[1, 2], [], [3, 4], [2**63]]


def arrays_of(values: list) -> list:
  """The values in every type of Arrow that can hold them: plain, views, encoded."""
  if any(isinstance(value, str) for value in values):
    plain = [arrow.array(values, kind()) for kind in (arrow.string, arrow.large_string, arrow.string_view)]
    numbers = arrow.array(range(len(values)), arrow.int32())
    with_null_values = [arrow.DictionaryArray.from_arrays(numbers, one) for one in plain]
    return [*plain, plain[0].dictionary_encode(), *with_null_values, *map(compute.run_end_encode, plain[:2])]
  kinds = [arrow.list_, arrow.large_list, arrow.list_view, arrow.large_list_view]
  found = [arrow.array(values, kind(arrow.uint64())) for kind in kinds]
  of_two = arrow.array([None if value is None else [1, 2] for value in values], arrow.list_(arrow.int16(), 2))
  return [*found, of_two, compute.run_end_encode(found[0]), arrow.array([value and [] for value in values])]


@pytest.mark.parametrize("values", [["ab", "", "h\u00e9llo, h\u00e9llo, h\u00e9llo", "x"], IDS], ids=["text", "tokens"])
def test_every_type_of_text_and_lists_is_read_with_its_nulls(values):
  """As pyarrow's to_pylist reads them."""
  for given in (
    values,
    [None, *values],
    [*values[:2], None, None, *values[2:]],
    [*values, None],
    [None, None, *values],
  ):
    for column in arrays_of(given):
      for part in (column, column.slice(1, 3), column.slice(len(column) - 1), column.slice(0, 1)):
        expected = [value for value in part.to_pylist() if value is not None]
        nested = arrow.record_batch([arrow.StructArray.from_arrays([part], ["text"])], names=["meta"])
        for batch, names in ((arrow.record_batch([part], names=["text"]), ["text"]), (nested, ["meta", "text"])):
          found = [one if isinstance(one, str) else one.tolist() for one in arrow_column.documents(batch, names, "x")]
          assert found == expected, (column.type, given)
