"""Records of token ids read in place: the examples of a copy, without one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.support.data_files import TOKENS, everything, load, write_records, written

from input_pipeline import describe
from input_pipeline.batch import DataError


def in_place(folder: Path, kind: str = "int32", documents: list | None = None) -> dict[str, str]:
  """Two files of token ids, and the keys to read each record as an example."""
  (folder / "records").mkdir(exist_ok=True)
  documents = documents or TOKENS
  dtype = {"int32": "<i4", "uint16": "<u2"}[kind]
  for number, part in enumerate((documents[:15], documents[15:])):
    write_records(folder / "records" / f"{number}", [ids.astype(dtype).tobytes() for ids in part])
  files = {"grain_train_files": f"{folder}/records", "grain_file_type": f"arrayrecord_{kind}"}
  return {**files, "packing": "none"}


@pytest.mark.parametrize("kind", ["int32", "uint16"])
def test_records_in_place_are_the_examples_of_a_copy(tmp_path, kind):
  loader = load(tmp_path, **in_place(tmp_path, kind))
  assert everything(loader) == everything(load(tmp_path, packing="none", **written(tmp_path, "tokens", "jsonl")))
  assert len(list((tmp_path / "cache").glob("corpus-*"))) == 1  # of the copy
  assert loader.describe(20)["epochs"] == 2
  assert "2 epochs of 40 examples" in describe.line(loader.describe(20))
  loader.close()
  loader.close()


def test_a_damaged_record_in_place_stops_the_run_with_record_and_file(tmp_path):
  keys = in_place(tmp_path)
  sound = load(tmp_path, **keys)
  path = tmp_path / "records" / "1.array_record"
  content = bytearray(path.read_bytes())
  content[content.find(np.arange(30, 35, dtype="<i4").tobytes())] ^= 1
  path.write_bytes(content)
  loader, failed = load(tmp_path, **keys), []
  for index in range(40):
    step, row = divmod(index, 4)
    try:
      read = loader.batch(step, np.array([row]))
      np.testing.assert_array_equal(read.tokens, sound.batch(step, np.array([row])).tokens)
    except DataError as error:
      failed.append(str(error))
  assert len(failed) == 1 and f"of {path} cannot be read" in failed[0]


@pytest.mark.parametrize(
  ("document", "kind", "message"),
  [
    (np.array([1, 300]), "int32", "record 3 of .*1.array_record: it has the token 300, but"),
    (np.array([]), "uint16", "record 3 of .*1.array_record: it has no tokens"),
    (np.array([1, -2]), "int32", "it has the token -2, but"),
  ],
)
def test_a_record_in_place_with_other_tokens_stops_the_run(tmp_path, document, kind, message):
  documents = list(TOKENS)
  documents[18] = document
  with pytest.raises((DataError, OSError), match=message):
    loader = load(tmp_path, **in_place(tmp_path, kind, documents))
    everything(loader)
