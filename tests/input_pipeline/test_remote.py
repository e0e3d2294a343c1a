"""Files with an address are read like local files. fsspec's memory:// stands for an object store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.data_files import TEXTS, everything, load, written

from input_pipeline import datasets, jsonl
from input_pipeline.options import DataOptions
from input_pipeline.tokenizer import BpeTokenizer, load_bpe, train_bpe
from trainer.config import ConfigError
from trainer.config import load as config_load

fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def store():
  """An empty object store in memory."""
  system = fsspec.filesystem("memory")
  system.store.clear()
  yield system
  system.store.clear()


def put(store, path: Path, name: str) -> None:
  """Copies a file, or the files of a folder."""
  for file in path.iterdir() if path.is_dir() else [path]:
    store.pipe(f"/bucket/{name}/{file.name}", file.read_bytes())


@pytest.mark.parametrize(("file_type", "number"), [("jsonl", 0), ("jsonl", 1), ("jsonl", 2), ("parquet", 0)])
def test_examples_and_identity_are_those_of_the_same_local_files(tmp_path, store, file_type, number):
  """So the files of a run may be moved to a bucket."""
  keys = written(tmp_path, "text", file_type, number)
  local = load(tmp_path, **keys)
  put(store, Path(keys["grain_train_files"].removesuffix("/*.parquet")), "corpus")
  far = load(
    tmp_path, **keys | {"grain_train_files": "memory://bucket/corpus", "dataset_cache_directory": f"{tmp_path}/2"}
  )
  assert everything(far) == everything(local)
  assert far.fingerprint() == local.fingerprint()


def names(tmp_path: Path, address: str) -> list[str]:
  cfg = DataOptions(dataset_type="grain", grain_train_files=address, grain_file_type="jsonl")
  return [piece.name for piece in datasets.find(cfg)["train"].pieces]


def test_files_folders_and_patterns_are_found(tmp_path, store):
  for name in ("a.jsonl", "deep/b.jsonl", "deep/deeper/c.json", ".hidden/d.jsonl", "deep/.e.jsonl", "deep/f.txt"):
    store.pipe(f"/bucket/{name}", b"{}")
  assert names(tmp_path, "memory://bucket") == ["a.jsonl", "deep/b.jsonl", "deep/deeper/c.json"]
  assert names(tmp_path, "memory://bucket/deep/") == ["b.jsonl", "deeper/c.json"]
  assert names(tmp_path, "memory://bucket/deep/*.jsonl") == ["b.jsonl"]
  assert names(tmp_path, "memory://bucket/**/*.json; memory://bucket/a.jsonl") == ["a.jsonl", "deep/deeper/c.json"]
  assert names(tmp_path, "memory://bucket/deep/f.txt") == ["f.txt"]


def test_text_of_an_address_is_that_of_the_same_folder(tmp_path, store):
  """Held-out text included: large files are cut at line ends."""
  folder = tmp_path / "text"
  folder.mkdir()
  for number in range(5):
    (folder / f"{number}.txt").write_text("\n".join(TEXTS * number))
  (folder / "lines.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
  put(store, folder, "text")
  found = [
    [load(tmp_path, split, dataset_type="text", dataset_path=path, eval_fraction=0.3) for split in ("train", "eval")]
    for path in (str(folder), "memory://bucket/text")
  ]
  for local, far in zip(*found, strict=True):
    assert everything(local) == everything(far)
    assert local.fingerprint() == far.fingerprint()


@pytest.mark.parametrize(
  ("address", "file_type", "message"),
  [
    ("memory://bucket/none", "jsonl", r"grain_train_files=memory://bucket/none: .* has no files"),
    ("memory://bucket/none*", "parquet", "has no files with grain_file_type=parquet"),
    ("memory://bucket/a.jsonl", "arrayrecord", "opens only files of this machine.\nMount the bucket as a folder"),
    ("nothing://bucket/a", "jsonl", r"cannot be found: ValueError: Protocol not known: nothing"),
    ("memory://bucket/a.jsonl; {folder}/b.jsonl", "jsonl", "some files are local and some are not"),
    ("memory://bucket/empty.jsonl", "jsonl", "memory:///bucket/empty.jsonl is an empty file"),
  ],
)
def test_wrong_addresses_are_refused_with_the_configuration(tmp_path, store, address, file_type, message):
  store.pipe({"/bucket/a.jsonl": b"{}", "/bucket/empty.jsonl": b""})
  (tmp_path / "b.jsonl").write_text("{}")
  keys = [f"grain_train_files={address.format(folder=tmp_path)}", f"grain_file_type={file_type}", "dataset_type=grain"]
  with pytest.raises(ConfigError, match=message):
    config_load(["configs/base.yml", *keys, f"base_output_directory={tmp_path}"])


def test_a_tokenizer_has_an_address(tmp_path, store):
  store.pipe("/bucket/tokenizer.json", train_bpe(TEXTS, 300).encode())
  keys = [f"base_output_directory={tmp_path}", "tokenizer_type=bpe", "vocab_size=300"]
  path = config_load(["configs/base.yml", *keys, "tokenizer_path=memory://bucket/tokenizer.json"]).data.tokenizer_path
  assert load_bpe(path).fingerprint == BpeTokenizer(train_bpe(TEXTS, 300)).fingerprint
  for wrong in ("memory://bucket/none", "memory://bucket"):
    with pytest.raises(ConfigError, match=f"tokenizer_path={wrong}: there is no such file"):
      config_load(["configs/base.yml", *keys, f"tokenizer_path={wrong}"])
    with pytest.raises(ConfigError, match=f"tokenizer_path={wrong}: there is no such file"):
      load_bpe(wrong)


def test_a_file_that_becomes_shorter_is_an_error(tmp_path, store):
  """Between listing and reading."""
  store.pipe("/bucket/a.jsonl", b'{"text": "abc"}\n' * 100)
  (piece,) = datasets.find(
    DataOptions(dataset_type="grain", grain_train_files="memory://bucket/a.jsonl", grain_file_type="jsonl")
  )["train"].pieces
  store.pipe("/bucket/a.jsonl", b'{"text": "abc"}\n' * 99)
  with pytest.raises(ConfigError, match=r"memory:///bucket/a.jsonl cannot be read .*1600 bytes .* become shorter"):
    list(jsonl.read(piece, "text"))
