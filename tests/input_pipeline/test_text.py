"""Text examples from files to batches: each exactly once, readable in any order, cached; damage raises an error."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from input_pipeline import prepare, prepared, store, windows
from input_pipeline.batch import Batch, DataError
from input_pipeline.loader import Loader, make_loader
from input_pipeline.options import DataOptions
from trainer.config.errors import ConfigError

LENGTH = 32
BATCH = 4


@pytest.fixture
def root(tmp_path) -> Path:
  folder = tmp_path / "corpus"
  folder.mkdir()
  for number in range(12):
    words = " ".join(f"word{(number * 7 + i * i) % 101}\u00e9" for i in range(10 + 5 * number))
    (folder / f"file{number:02}.txt").write_text(f"{words}\n", encoding="utf-8")
  lines = [json.dumps({"text": f"line {i} of the jsonl"}) for i in range(9)]
  (folder / "lines.jsonl").write_text("\n".join(lines), encoding="utf-8")
  return folder


def section(root: Path, **keys) -> DataOptions:
  defaults = {"dataset_path": str(root), "dataset_cache_directory": str(root.parent / "cache"), "eval_fraction": 0.2}
  return DataOptions(**{**defaults, "max_target_length": LENGTH, **keys})


def load(root: Path, split="train", vocab_size=300, batch=BATCH, log=print, **keys) -> Loader:
  cfg = section(root, **keys)
  return make_loader(cfg, vocab_size=vocab_size, global_batch_size=batch, split=split, log=log)


def assert_equal(left: Batch, right: Batch) -> None:
  for name, a, b in zip(Batch._fields, left, right):
    np.testing.assert_array_equal(a, b, err_msg=name)


def windows_of(loader: Loader, first: int, count: int) -> list[bytes]:
  """`count` examples of the loader from `first` on, each as bytes."""
  rows = [loader.batch(*divmod_row(loader, index)) for index in range(first, first + count)]
  return [b"".join(field.tobytes() for field in row) for row in rows]


def divmod_row(loader: Loader, index: int) -> tuple[int, np.ndarray]:
  step, row = divmod(index, BATCH)
  return step, np.array([row])


def pairs(batch: Batch) -> Counter:
  """The (token, target) pairs that count in the loss."""
  counted = batch.weights > 0
  return Counter(zip(batch.tokens[counted].tolist(), batch.targets[counted].tolist()))


def targets(loader: Loader) -> int:
  """Number of tokens of the split that count in the loss, from the cache's metadata."""
  return loader._source._meta["splits"][loader._source._split]["targets"]


def corpus_documents(root: Path) -> dict[str, list[str]]:
  files = {path.name: [path.read_text(encoding="utf-8")] for path in root.glob("*.txt")}
  lines = (root / "lines.jsonl").read_text(encoding="utf-8").splitlines()
  return files | {"lines.jsonl": [json.loads(line)["text"] for line in lines]}


def test_an_epoch_holds_every_window_exactly_once(root):
  loader = load(root)
  count = loader.num_examples
  assert count > 20
  epochs = [windows_of(loader, epoch * count, count) for epoch in range(3)]
  assert len(set(epochs[0])) == count
  assert set(epochs[0]) == set(epochs[1]) == set(epochs[2])
  assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_both_splits_are_the_corpus(root):
  """Each pair of adjacent tokens in a document is a weighted (token, target) exactly once. There are no other pairs."""
  expected = Counter()
  for documents in corpus_documents(root).values():
    for text in documents:
      ids = [256, *text.encode(), 257]
      expected.update(itertools.pairwise(ids))
  found = Counter()
  for split in ("train", "eval"):
    loader = load(root, split)
    for index in range(loader.num_examples):
      found.update(pairs(loader.batch(*divmod_row(loader, index))))
  assert found == expected


def test_random_access_in_any_order_and_rows(root):
  forward, backward = load(root), load(root)
  steps = [0, 1, 7, 1000, 10**9]
  batches = {step: forward.batch(step) for step in steps}
  for step in reversed(steps):
    assert_equal(backward.batch(step), batches[step])
  rows = np.array([3, 1, 1])
  assert_equal(backward.batch(7, rows), Batch(*(field[rows] for field in batches[7])))
  padded = backward.batch(7, np.array([-1, 2]))
  assert all((field[0] == 0).all() for field in padded)
  np.testing.assert_array_equal(padded.tokens[1], batches[7].tokens[2])


def test_the_cache_is_reused_until_text_or_settings_change(root):
  def work(**keys) -> list[str]:
    lines = []
    load(root, log=lines.append, **keys)
    return lines

  assert len(work()) == 2 and work() == []
  assert work(split="eval") == [] and work(data_shuffle_seed=7) == [] and work(batch=2) == []
  assert len(work(max_target_length=16)) == 2
  assert len(work(eval_fraction=0.6)) == 2
  assert len(work(tokenizer_type="bpe")) == 3
  before = load(root).fingerprint()
  file = root / "file03.txt"
  file.write_text(file.read_text(encoding="utf-8").replace("word", "ward", 1), encoding="utf-8")
  assert len(work()) == 2 and load(root).fingerprint() != before
  file.rename(root / "file03b.txt")
  assert len(work()) == 2 and work() == []


def entries(root: Path) -> list[Path]:
  return sorted((root.parent / "cache").glob("corpus-*"))


@pytest.mark.parametrize("damage", ["truncated", "absent", "bad meta", "unlike"])
def test_a_damaged_cache_is_made_again(root, damage):
  expected = load(root).batch(0)
  (folder,) = entries(root)
  records, meta = folder / "train.records", folder / "meta.json"
  content = records.read_bytes()
  match damage:
    case "truncated":
      records.write_bytes(content[: len(content) // 2])
    case "absent":
      records.unlink()
    case "bad meta":
      meta.write_text("{")
    case "unlike":
      records.write_bytes(b"\x5a" * len(content))
  lines = []
  again = load(root, log=lines.append)
  assert "is damaged (" in lines[0] and "Making it again" in lines[0] and len(lines) == 3
  assert_equal(again.batch(0), expected)
  assert load(root, log=lines.append) and len(lines) == 3


def test_a_damaged_record_stops_the_run_with_step_and_file(root):
  sound = load(root)
  (folder,) = entries(root)
  path = folder / "train.records"
  content = bytearray(path.read_bytes())
  place = content.find(b"w\0o\0r\0d\0", len(content) // 2)  # the tokens of a record; opening reads first and last
  content[place] ^= 1
  path.write_bytes(content)
  damaged, failed = load(root), 0
  for index in range(sound.num_examples):
    step, row = divmod_row(sound, index)
    try:
      assert_equal(damaged.batch(step, row), sound.batch(step, row))
    except DataError as error:
      failed += 1
      assert error.step == step and f"step {step}: record" in str(error) and str(path) in str(error)
      assert isinstance(error.__cause__, OSError)
  assert failed == 1


def test_bad_input_is_refused(root, tmp_path):
  for keys, message in [
    (
      {"vocab_size": 257},
      "vocab_size=257 is smaller than the byte tokenizer's 258 ids. Set vocab_size to at least 258",
    ),
    ({"vocab_size": 100, "tokenizer_type": "bpe"}, "vocab_size=100 is too small"),
    (
      {"batch": 10_000},
      r"train text of .*corpus has at most \d+ tokens to learn, but 10000 examples of max_target_length=32.*more text",
    ),
    ({"max_target_length": 100_000}, "4 examples of max_target_length=100000"),
    ({"tokenizer_path": "x.json"}, "tokenizer_path=x.json: has no effect with tokenizer_type=byte"),
    ({"tokenizer_path": "x.json", "tokenizer_type": "bpe"}, "tokenizer_path=x.json: .*No such file"),
    (
      {"split": "eval", "eval_fraction": 0.0},
      r"The eval text of .*corpus has 0 tokens.*Set eval_fraction or eval_dataset_path, or eval_steps=0",
    ),
    ({"eval_fraction": 1.0}, "eval_fraction=1: leaves nothing"),
    ({"eval_dataset_path": str(tmp_path / "none")}, "eval_dataset_path=.*none does not exist"),
    ({"dataset_path": str(tmp_path / "none")}, "dataset_path=.*none does not exist"),
  ]:
    with pytest.raises(ConfigError, match=message):
      load(root, **keys)


FULL_DISK = """
import pathlib, resource, sys
from input_pipeline import store
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
  store.write(pathlib.Path(sys.argv[1]), [bytes(range(256)) * 4] * 1000)
except OSError as error:
  print(error)
"""


def test_a_full_disk_is_an_os_error_that_names_the_file(tmp_path, python):
  """Simulated by a limit on file sizes, at a tenth of what the records need."""
  printed = python(FULL_DISK, str(tmp_path / "train.records")).communicate(timeout=120)[0]
  assert "train.records cannot be written: [Errno 27] File too large" in printed


class _Many:
  """Stands for a file of a billion records: record i contains i."""

  def __init__(self, path: Path, count: int) -> None:
    self._count = count

  def __len__(self) -> int:
    return self._count

  def __getitem__(self, number: int) -> bytes:
    return windows.pack(windows.Window(np.array([number, 0]), np.zeros(0, np.int64)), np.dtype("<u4"))


def test_a_billion_examples_are_shuffled_in_constant_memory(tmp_path, monkeypatch):
  count = 10**9
  split = {"windows": count, "targets": count}
  meta = {"format": prepare.FORMAT, "key": "x", "length": 1, "dtype": "<u4", "splits": {"train": split}}
  (tmp_path / "meta.json").write_text(json.dumps(meta))
  monkeypatch.setattr(store, "Records", _Many)
  source = prepared.PreparedSource(tmp_path, name="many", split="train", seed=3, tokenizer=None)
  first = [int(source.example(index).tokens[0]) for index in range(1000)]
  tracemalloc.start()
  drawn = [int(source.example(index).tokens[0]) for index in range(count - 1000, count)]  # the end of the epoch
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  assert len({*first, *drawn}) == 2000
  assert peak < 2_000_000
  # Uniform: the mean of 2,000 draws has a standard deviation of 0.0065 of the range.
  assert abs(np.mean(first + drawn) / count - 0.5) < 0.026
  assert [int(source.example(index).tokens[0]) for index in range(count, count + 100)] != first[:100]  # another epoch
