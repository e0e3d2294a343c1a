"""Folders of Hugging Face datasets: the files are written by pyarrow here, as save_to_disk writes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.data_files import ARROW, TEXTS, TOKENS, everything, load, written

from input_pipeline import arrow_column, hf
from input_pipeline.documents import Piece
from trainer.config.errors import ConfigError
from trainer.config.load import load as config_load

arrow = pytest.importorskip("pyarrow", reason=ARROW)
compute = pytest.importorskip("pyarrow.compute", reason=ARROW)


def save(folder: Path, values: list, files: int = 2) -> None:
  """Writes a single dataset: Arrow streams with record batches of 7 rows, and state.json."""
  folder.mkdir(parents=True)
  values = [value if isinstance(value, str) else value.tolist() for value in values]
  names = []
  for number in range(files):
    part = values[number * len(values) // files : (number + 1) * len(values) // files]
    table = arrow.table({"id": list(range(len(part))), "body": part})
    names.append(f"data-{number:05}-of-{files:05}.arrow")
    with arrow.OSFile(str(folder / names[-1]), "wb") as file, arrow.ipc.new_stream(file, table.schema) as writer:
      writer.write_table(table, max_chunksize=7)
  state = {"_data_files": [{"filename": name} for name in names], "_split": None, "_fingerprint": "0"}
  (folder / "state.json").write_text(json.dumps(state))


def save_splits(folder: Path, **splits: list) -> Path:
  for name, values in splits.items():
    save(folder / name, values)
  (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))
  return folder


def keys_of(folder: Path, **keys: str) -> dict[str, str]:
  return {"dataset_type": "hf", "dataset_path": str(folder), "train_data_columns": "body", **keys}


@pytest.mark.parametrize("kind", ["text", "tokens"])
def test_a_saved_dataset_has_the_documents_of_its_writer(tmp_path, kind):
  values = TEXTS if kind == "text" else TOKENS
  (tmp_path / "reference").mkdir()
  want = load(tmp_path, **written(tmp_path / "reference", kind, "jsonl"))
  save(tmp_path / "single", values, files=3)
  assert everything(load(tmp_path, **keys_of(tmp_path / "single"))) == everything(want)
  several = save_splits(tmp_path / "splits", train=values, validation=values[:3])
  loader = load(tmp_path, **keys_of(several, eval_split="validation"))
  assert everything(loader) == everything(want) and loader.has_eval
  assert load(tmp_path, "eval", packing="none", **keys_of(several, eval_split="validation")).num_examples == 3


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
def test_every_type_of_text_and_lists_is_read_with_its_nulls(tmp_path, values):
  """As pyarrow's to_pylist reads them, in all readers of Arrow data."""
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
      path = tmp_path / "a.arrow"
      with arrow.ipc.new_stream(path, arrow.schema([("text", column.type)])) as writer:
        writer.write_table(arrow.table({"text": arrow.chunked_array([column, column.slice(1)])}))
      whole = [value for value in (column.to_pylist() + column.to_pylist()[1:]) if value is not None]
      found = [*hf.read(Piece("a", path, 0, path.stat().st_size), "text")]
      assert [one if isinstance(one, str) else one.tolist() for one in found] == whole, (column.type, given)


def test_wrong_folders_are_refused(tmp_path):
  folder = save_splits(tmp_path / "splits", train=TEXTS)
  for keys, message in (
    (keys_of(folder, train_split="test"), "has no split test. Set train_split and eval_split to some of train"),
    (keys_of(folder, train_data_columns="words"), "has no such column. Choose one of id, body"),
    (keys_of(folder, train_data_columns="id"), "has the type int64"),
    (keys_of(folder / "train", eval_split="test"), "is a single dataset without splits"),
    (keys_of(tmp_path), "has no dataset that datasets has saved"),
  ):
    with pytest.raises(ConfigError, match=message):
      load(tmp_path, **keys)
  path = folder / "train" / "data-00001-of-00002.arrow"
  path.write_bytes(path.read_bytes()[:-700])
  with pytest.raises(ConfigError, match=r"data-00001-of-00002.arrow cannot be read after record batch \d"):
    load(tmp_path, **keys_of(folder))
  state = folder / "train" / "state.json"
  state.write_text(json.dumps({"_data_files": [], "_indices_data_files": [{"filename": "a"}]}))
  with pytest.raises(ConfigError, match="Save it again after flatten_indices"):
    load(tmp_path, **keys_of(folder))
  state.write_text("[]")
  with pytest.raises(ConfigError, match=r"state.json cannot be read \(it is not a mapping\)"):
    load(tmp_path, **keys_of(folder))
  with pytest.raises(ConfigError, match=r"has neither dataset_dict.json nor state.json"):
    config_load(["configs/base.yml", "dataset_type=hf", f"dataset_path={tmp_path}"])
