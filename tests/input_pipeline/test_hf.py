"""Folders of Hugging Face datasets: the files are written by pyarrow here, as save_to_disk writes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.data_files import ARROW, TEXTS, TOKENS, everything, load, written

from trainer.config.errors import ConfigError
from trainer.config.load import load as config_load

arrow = pytest.importorskip("pyarrow", reason=ARROW)


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


def test_files_without_documents_and_nested_columns(tmp_path):
  rows = [[{"meta": {"body": None}}] * 3, [{"meta": None}, *({"meta": {"body": text}} for text in TEXTS)]]
  parts = [*map(arrow.Table.from_pylist, rows), arrow.table({"other": arrow.nulls(0)})]
  parts += [arrow.table({"meta": arrow.nulls(2)}), arrow.Table.from_pylist([{"meta": {"body": None}}]).slice(1)]
  folder = tmp_path / "nested"
  folder.mkdir()
  names = [f"{number}.arrow" for number in range(len(parts))]
  for name, table in zip(names, parts):
    with arrow.OSFile(str(folder / name), "wb") as file, arrow.ipc.new_stream(file, table.schema) as writer:
      writer.write_table(table)
  (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
  found = everything(load(tmp_path, **keys_of(folder, train_data_columns="meta.body")))
  assert found == everything(load(tmp_path, **written(tmp_path, "text", "jsonl")))


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
