"""Documents of every format: the same documents give the same batches, and wrong data are refused with a reason."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tests.support import tfds_dataset
from tests.support.data_files import (
  ARROW,
  LENGTH,
  TEXT_WRITERS,
  TEXTS,
  TOKEN_WRITERS,
  TOKENS,
  everything,
  load,
  tf_example_of,
  write_examples,
  write_gzip,
  write_parquet,
  written,
)

from input_pipeline import prepare, tf_example
from input_pipeline.batch import DataError
from input_pipeline.loader import make_loader
from trainer.config import mixture_files as mixture_file
from trainer.config.errors import ConfigError
from trainer.config.load import load as config_load

CASES = [
  pytest.param(kind, file_type, number, id=f"{kind}-{file_type}-{number}")
  for kind, table in (("text", TEXT_WRITERS), ("tokens", TOKEN_WRITERS))
  for file_type, writers in table.items()
  for number in range(len(writers))
]


@pytest.mark.parametrize(("kind", "file_type", "number"), CASES)
def test_every_format_gives_the_same_examples(tmp_path, kind, file_type, number):
  (tmp_path / "reference").mkdir()
  want = load(tmp_path, **written(tmp_path / "reference", kind, "jsonl"))
  loader = load(tmp_path, **written(tmp_path, kind, file_type, number))
  assert everything(loader) == everything(want) and len(everything(want)) > 15
  assert (loader.tokenizer is None) == (kind == "tokens")
  assert loader.unigram_entropy() == want.unigram_entropy()


@pytest.mark.parametrize("kind", ["text", "tokens"])
def test_a_document_per_example_is_the_document(tmp_path, kind):
  loader = load(tmp_path, packing="none", **written(tmp_path, kind, "jsonl"))
  want = [ids.tolist() for ids in TOKENS]
  if kind == "text":
    want = [[256, *text.encode(), 257] for text in TEXTS]
  batches = [loader.batch(step) for step in range(len(want) // 4)]
  found = [
    [*tokens[weights > 0].tolist(), targets[weights > 0][-1]]
    for batch in batches
    for tokens, targets, weights in zip(batch.tokens, batch.targets, batch.weights)
  ]
  assert sorted(found) == sorted(ids[: LENGTH + 1] for ids in want)


# ---- TFDS


@pytest.fixture(scope="module")
def tfds_folder(tmp_path_factory) -> Path:
  return tfds_dataset.prepare(tmp_path_factory.mktemp("tfds"), TEXTS, TOKENS)


@pytest.mark.parametrize(("column", "kind"), [("body", "text"), ("ids", "tokens")])
def test_a_tfds_dataset_has_the_documents_of_its_builder(tmp_path, tfds_folder, column, kind):
  keys = {"dataset_type": "tfds", "dataset_path": str(tfds_folder), "train_data_columns": column, "packing": "none"}
  loader = load(tmp_path, eval_split="held_out", **keys)
  (tmp_path / "reference").mkdir()
  want = load(tmp_path, packing="none", **written(tmp_path / "reference", kind, "jsonl"))
  assert len(list(tfds_folder.glob("*train*"))) == 2
  assert sorted(everything(loader)) == sorted(everything(want))
  assert loader.has_eval and load(tmp_path, "eval", eval_split="held_out", **keys).num_examples == 3
  # The same files without the package, by our parser of tf.train.Example.
  direct = {"grain_train_files": f"{tfds_folder}/*-train*", "train_data_columns": column, "packing": "none"}
  assert everything(load(tmp_path, **direct)) == everything(loader)


def test_a_tfds_dataset_that_was_prepared_again_is_another_one(tmp_path, tfds_folder):
  keys = {"dataset_type": "tfds", "train_data_columns": "body", "packing": "none"}
  copied = shutil.copytree(tfds_folder, tmp_path / "copy" / "1.0.0")
  first = load(tmp_path, dataset_path=str(tfds_folder), **keys).fingerprint()
  assert load(tmp_path, dataset_path=str(copied), **keys).fingerprint() == first
  other = [*TEXTS[:-1], TEXTS[-1][::-1]]
  shutil.copytree(tfds_dataset.prepare(tmp_path / "new", other, TOKENS), copied, dirs_exist_ok=True)
  assert load(tmp_path, dataset_path=str(copied), **keys).fingerprint() != first


@pytest.mark.parametrize(
  ("keys", "message"),
  [
    ({"train_split": "test"}, "no split test. Set train_split and eval_split to some of"),
    ({"train_data_columns": "words"}, "train_data_columns=words: .* has no such feature. Choose one of body, ids"),
    ({"train_data_columns": "score"}, "record 0 of .*: its score is a float. A document is"),
    ({"dataset_path": "/"}, "dataset_path=/ has no dataset that tensorflow-datasets has prepared"),
  ],
)
def test_wrong_tfds_keys_are_refused(tmp_path, tfds_folder, keys, message):
  given = {"dataset_type": "tfds", "dataset_path": str(tfds_folder), "train_data_columns": "body", **keys}
  with pytest.raises(ConfigError, match=message):
    load(tmp_path, **given)


# ---- tf.train.Example


@pytest.mark.parametrize("packed", [True, False])
def test_features_of_an_example(packed):
  values = np.array([0, 1, 127, 128, 300, 2**31, 2**62, -1], np.int64)
  features = {"text": "\u00e9t\u00e9" * 50, "ids": values, "none": np.zeros(0, np.int64), "x": np.ones(3, np.float32)}
  record = tf_example_of(features, packed)
  assert tf_example.document(record, "text") == features["text"]
  np.testing.assert_array_equal(tf_example.document(record, "ids"), values)
  assert len(tf_example.document(record, "none")) == 0
  with pytest.raises(ValueError, match='no field "body"; it has text, ids, none, x'):
    tf_example.document(record, "body")
  with pytest.raises(ValueError, match="its x is a ndarray of float32"):
    tf_example.document(record, "x")


def test_other_bytes_are_no_example():
  """Every prefix and random bytes: a ValueError, or a feature if the damage is elsewhere, and never another error."""
  record = tf_example_of({"ids": np.arange(300), "text": "abc"})
  rng = np.random.default_rng(0)
  refused = 0
  for damaged in [record[:stop] for stop in range(len(record))] + [rng.bytes(40) for _ in range(300)]:
    try:
      tf_example.document(damaged, "text")
    except ValueError:
      refused += 1
  assert refused == len(record) + 300


# ---- refusals


def broken(folder: Path, case: str) -> dict[str, str]:
  """Keys of wrong data."""
  file_type = case.partition(" ")[0]
  if file_type == "parquet":
    pytest.importorskip("pyarrow", reason=ARROW)
  path, keys = folder / "data", {"grain_file_type": file_type, "train_data_columns": "body"}
  match case.partition(" ")[2]:
    case "garbage":
      path.write_bytes(b"\x00\x01garbage" * 1000)
      return {"grain_train_files": str(path), **keys}
    case "other column":
      return {**written(folder, "text", file_type), "train_data_columns": "text"}
    case "nulls in a list":
      parquet, arrow = (pytest.importorskip(name, reason=ARROW) for name in ("pyarrow.parquet", "pyarrow"))
      parquet.write_table(arrow.table({"body": [[1, None]]}), path)
      return {"grain_train_files": str(path), **keys}
    case "too large":
      return written(folder, "tokens", file_type, values=[np.array([3, 300])])
    case "cut off":
      name = Path(written(folder, "text", file_type)["grain_train_files"])
      path.with_suffix(".jsonl.gz").write_bytes(gzip.compress(name.read_bytes())[:-20])
      return {"grain_train_files": f"{path}.jsonl.gz", **keys}
    case "text of tokens":
      return {
        **written(folder, "tokens", "arrayrecord_uint16", values=[np.full(4, 0xFFFF)]),
        "grain_file_type": file_type,
      }
    case "mixed kinds":
      return written(folder, "text", file_type, values=["text", np.arange(3)])
    case "missing":
      return {"grain_train_files": str(folder / "gone*"), **keys}
    case "bucket":
      return {"grain_train_files": "gs://bucket/x", **keys}
    case other:
      assert other == "empty file"
      path.touch()
      return {"grain_train_files": str(path), **keys}


@pytest.mark.parametrize(
  ("case", "message"),
  [
    ("jsonl missing", r"grain_train_files=.*gone\*: .* has no files with grain_file_type=jsonl"),
    ("arrayrecord bucket", "the reader of ArrayRecord opens only files of this machine"),
    ("jsonl empty file", "data is an empty file"),
    ("jsonl garbage", r"data:1: .*Every line must be like \{\"body\""),
    ("jsonl other column", r'data.jsonl:1: no field "text"; it has id, body. Set train_data_columns'),
    ("jsonl cut off", r"data.jsonl.gz cannot be read after line \d+ \(Compressed file ended"),
    (
      "jsonl too large",
      r"document 1 of .*data.jsonl: it has the token 300, but tokens must be from 0 to vocab_size - 1 = 299",
    ),
    ("jsonl mixed kinds", "document 2 of .*data.jsonl is token ids, and documents before it are not"),
    ("parquet garbage", "data cannot be read as Parquet"),
    ("parquet other column", r"train_data_columns=text: .*0.parquet has no such column. Choose one of id, body"),
    ("parquet nulls in a list", "a list of column body contains a null"),
    ("arrayrecord garbage", "data cannot be read as ArrayRecord"),
    ("arrayrecord text of tokens", "record 0 of .*not a tf.train.Example"),
    ("arrayrecord_text text of tokens", "record 0 of .*invalid start byte"),
  ],
)
def test_wrong_data_are_refused_and_nothing_is_prepared(tmp_path, case, message):
  keys = broken(tmp_path, case)
  with pytest.raises(ConfigError, match=message):
    load(tmp_path, **keys)
  assert [path for path in tmp_path.glob("cache/*") if not path.name.startswith("kind-")] == []


def parts_without_documents(arrow) -> dict:
  """Tables as programs write them for a part of a dataset in which nothing has a text."""
  return {
    "column of nulls": arrow.table({"body": arrow.nulls(5)}),
    "no rows, null type": arrow.table({"body": arrow.nulls(0)}),
    "no rows, no columns": arrow.table({}),
    "no rows, numbers": arrow.table({"body": arrow.array([], arrow.float64())}),
    "nulls of another type": arrow.table({"body": arrow.array([None, None], arrow.float64())}),
    "empty lists": arrow.table({"body": [[], []]}),
    "empty texts": arrow.table({"body": ["", None]}),
  }


def test_parts_without_documents_do_not_end_a_run(tmp_path):
  arrow, parquet = (pytest.importorskip(name, reason=ARROW) for name in ("pyarrow", "pyarrow.parquet"))
  (tmp_path / "parts").mkdir()
  parts = parts_without_documents(arrow)
  for number, table in enumerate(parts.values()):
    parquet.write_table(table, tmp_path / "parts" / f"{number}.parquet")
  keys = {"grain_train_files": f"{tmp_path}/parts", "grain_file_type": "parquet", "train_data_columns": "body"}
  with pytest.raises(ConfigError, match="parts has no documents"):
    load(tmp_path, **keys)
  parquet.write_table(arrow.table({"body": TEXTS}), tmp_path / "parts" / "9.parquet")
  expected = everything(load(tmp_path, **written(tmp_path, "text", "jsonl")))
  assert everything(load(tmp_path, **keys)) == expected
  lines = (tmp_path / "data.jsonl").read_text()
  (tmp_path / "data.jsonl").write_text('{"body": null}\n' + lines + '{"body": ""}\n')
  assert everything(load(tmp_path, grain_train_files=f"{tmp_path}/data.jsonl", **JSONL)) == expected


JSONL = {"grain_file_type": "jsonl", "train_data_columns": "body"}


def test_nested_columns_are_read(tmp_path):
  arrow, parquet = (pytest.importorskip(name, reason=ARROW) for name in ("pyarrow", "pyarrow.parquet"))
  expected = everything(load(tmp_path, **written(tmp_path, "text", "jsonl")))
  rows = [{"meta": {"in": {"body": text}, "n": 1}, "id": 1} for text in TEXTS]
  rows.insert(3, {"meta": {"in": None, "n": 1}, "id": 2})
  rows.insert(5, {"meta": None, "id": 2})
  parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "nested.parquet")
  (tmp_path / "nested.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  for file_type in ("parquet", "jsonl"):
    keys = {"grain_train_files": f"{tmp_path}/nested.{file_type}", "grain_file_type": file_type}
    assert everything(load(tmp_path, train_data_columns="meta.in.body", **keys)) == expected
    for column in ("meta.body", "in.body", "meta.in.body.x", "."):
      with pytest.raises(ConfigError, match=f"{column}.*no such column.*meta.in|no field .{column}"):
        load(tmp_path, train_data_columns=column, **keys)
  keys = {"grain_train_files": f"{tmp_path}/nested.parquet", "grain_file_type": "parquet"}
  with pytest.raises(ConfigError, match=r"meta.in: in .* it has the type struct<body: string>"):
    load(tmp_path, train_data_columns="meta.in", **keys)
  # A column with such a name comes first.
  dotted = [{"meta.in": text, "meta": {"in": "no"}} for text in TEXTS]
  parquet.write_table(arrow.Table.from_pylist(dotted), tmp_path / "dotted.parquet")
  (tmp_path / "dotted.jsonl").write_text("".join(json.dumps(row) + "\n" for row in dotted))
  for file_type in ("parquet", "jsonl"):
    keys = {"grain_train_files": f"{tmp_path}/dotted.{file_type}", "grain_file_type": file_type}
    assert everything(load(tmp_path, train_data_columns="meta.in", **keys)) == expected


@pytest.mark.parametrize("change", ["content", "size"])
def test_files_that_change_while_they_are_prepared_are_refused(tmp_path, monkeypatch, change):
  """The cache would keep them under the identity of the files before."""
  keys = written(tmp_path, "text", "jsonl")
  path = Path(keys["grain_train_files"])
  build = prepare.build

  def build_and_change(folder: Path, log, **arguments) -> None:
    build(folder, log, **arguments)
    old = path.read_bytes()
    path.write_bytes(old.replace(b"document 3", b"document 8") if change == "content" else old + b"\n")

  monkeypatch.setattr(prepare, "build", build_and_change)
  with pytest.raises(ConfigError, match="Start again when"):
    load(tmp_path, **keys)
  assert not list((tmp_path / "cache").glob("corpus-*"))


def test_a_record_that_is_damaged_later_names_step_and_file(tmp_path):
  loader = load(tmp_path, **written(tmp_path, "tokens", "jsonl"))
  (path,) = (tmp_path / "cache").glob("corpus-*/train.records")
  path.write_bytes(b"\x00" * path.stat().st_size)
  with pytest.raises(DataError, match=r"step 2: record \d+ of .*train.records cannot be read: its checksum is wrong"):
    loader.batch(2)


@pytest.mark.parametrize("name", ["jsonl", "parquet", "array_record", "tfds"])
def test_the_example_configurations_run_on_data_of_their_format(tmp_path, request, name):
  if name == "tfds":
    data = [f"dataset_path={request.getfixturevalue('tfds_folder')}", "train_data_columns=body"]
  else:
    writer = {"jsonl": write_gzip, "parquet": write_parquet, "array_record": write_examples}[name]
    data = [f"grain_train_files={writer(tmp_path / 'data', 'text', TEXTS)}"]
  root = Path(__file__).parents[2] / "configs" / "data" / f"{name}.yml"
  keys = [
    *data,
    "max_target_length=32",
    f"dataset_cache_directory={tmp_path}/cache",
    f"base_output_directory={tmp_path}",
  ]
  config = config_load([str(root), *keys])
  mixture = mixture_file.read(config.data)
  loader = make_loader(config.data, vocab_size=4096, global_batch_size=4, split="train", mixture=mixture, log=print)
  assert "document" in loader.tokenizer.decode(loader.batch(0).tokens.ravel())
