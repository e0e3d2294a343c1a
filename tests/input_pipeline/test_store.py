"""Records in a file: read by number from any thread; damage, full disks and absent files are errors with a name."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from input_pipeline import store


@settings(deadline=None, max_examples=30)
@given(records=st.lists(st.binary(max_size=40), max_size=20))
def test_what_was_written_is_read(tmp_path_factory, records):
  path = tmp_path_factory.mktemp("store") / "a.records"
  assert store.write(path, records) == len(records)
  assert store.fault(path, len(records)) is None
  read = store.Records(path, len(records))
  assert [read[number] for number in reversed(range(len(read)))] == records[::-1]
  read.close()


def test_every_damaged_bit_is_found(tmp_path):
  path = tmp_path / "a.records"
  store.write(path, [b"abc", b"defg", b"h"])
  for file in (path, store.index_of(path)):
    sound = file.read_bytes()
    for place in range(len(sound)):
      file.write_bytes(sound[:place] + bytes([sound[place] ^ 16]) + sound[place + 1 :])
      records, failed = store.Records(path, 3), 0
      for number, content in enumerate([b"abc", b"defg", b"h"]):
        try:
          assert records[number] == content, (file, place)
        except OSError as error:
          assert f"record {number} of {path} cannot be read" in str(error)
          failed += 1
      records.close()
      assert failed, (file, place)
    file.write_bytes(sound)


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"x", lambda data: b""])
def test_a_file_of_another_size_is_a_fault(tmp_path, change):
  path = tmp_path / "a.records"
  store.write(path, [b"abc", b"defg"])
  for file in (path, store.index_of(path)):
    sound = file.read_bytes()
    file.write_bytes(change(sound))
    assert "does not hold 2 records" in store.fault(path, 2)
    file.write_bytes(sound)
  assert store.fault(path, 2) is None and "does not hold 1 records" in store.fault(path, 1)
