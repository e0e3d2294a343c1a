"""Text examples from files to batches: each exactly once, readable in any order, cached; damage raises an error."""

from __future__ import annotations

import itertools
import json
import math
import re
import signal
import threading
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from input_pipeline import describe, packages, prepare, prepared, store, windows
from input_pipeline.batch import Batch, DataError
from input_pipeline.loader import Loader, make_loader
from input_pipeline.options import DataOptions
from input_pipeline.tokenizer import ByteTokenizer, train_bpe
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


def test_windows_in_file_order_spell_the_files(root):
  """Without shuffling, the windows of a split are its documents, sorted by name."""
  loader = load(root)
  records = loader._source._records
  cut = [windows.unpack(records[number], np.dtype("<u2")) for number in range(len(records))]
  stream = np.concatenate([window.tokens[:-1] for window in cut] + [cut[-1].tokens[-1:]])
  documents = [bytes(part[1:-1].tolist()).decode() for part in np.split(stream, np.where(stream == 256)[0][1:])]
  every = corpus_documents(root)
  in_order = [text for name in sorted(every) for text in every[name]]
  assert documents == [text for text in in_order if text in set(documents)] and len(documents) > 8


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


def test_the_batch_size_cuts_one_order_of_examples(root):
  small, large = load(root, batch=2), load(root, batch=6)
  parts = [small.batch(step) for step in (3, 4, 5)]
  assert_equal(large.batch(1), Batch(*(np.concatenate(fields) for fields in zip(*parts))))


def test_threads_read_the_same(root):
  loader = load(root)
  expected = [loader.batch(step) for step in range(40)]
  fresh, wrong = load(root), []

  def read(steps):
    for step in steps:
      if any(not np.array_equal(a, b) for a, b in zip(fresh.batch(step), expected[step])):
        wrong.append(step)

  threads = [threading.Thread(target=read, args=(range(start, 40, 2),)) for start in (0, 1, 0, 1)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(60)
  assert wrong == []


def test_seeds_give_other_orders_of_the_same_windows(root):
  loaders = [load(root, data_shuffle_seed=seed) for seed in (0, 1, 2**40, -3)]
  orders = [windows_of(loader, 0, loader.num_examples) for loader in loaders]
  assert len({tuple(order) for order in orders}) == 4 and len({frozenset(order) for order in orders}) == 1
  assert len({loader.fingerprint() for loader in loaders}) == 4
  # Seed 1 is not the order of seed 0 one epoch later.
  assert windows_of(loaders[0], loaders[0].num_examples, loaders[0].num_examples) != orders[1]


def test_cursor_counts_epochs(root):
  loader = load(root, data_shuffle_seed=5)
  step = 2 * loader.num_examples // BATCH + 1
  expected = {"next_example": step * BATCH, "seed": 5, "epoch": 2, "mixture": {}, "bad_records": 0}
  cursor = json.loads(json.dumps(loader.cursor(step)))
  assert [*cursor.pop("sources").values()] == [step * BATCH]
  assert cursor == expected


def test_reuse_example_batch(root):
  assert_equal(load(root, reuse_example_batch=1).batch(9), load(root).batch(0))


def test_evaluation_covers_the_split_once_and_then_pads(root):
  loader = load(root, "eval")
  steps = math.ceil(loader.num_examples / BATCH)
  batches = [loader.batch(step) for step in range(steps + 2)]
  empty = sum(int((batch.segment_ids == 0).all(axis=1).sum()) for batch in batches)
  assert empty == (steps + 2) * BATCH - loader.num_examples
  assert sum(batch.weights.sum() for batch in batches) == targets(loader)
  # Independent of the training order.
  assert_equal(load(root, "eval", data_shuffle_seed=9).batch(0), batches[0])


def test_evaluation_files_of_their_own(root, tmp_path):
  (tmp_path / "held.txt").write_text("evaluate me", encoding="utf-8")
  keys = {"eval_dataset_path": str(tmp_path / "held.txt")}
  batch = load(root, "eval", **keys).batch(0)
  assert ByteTokenizer().decode(batch.tokens[0][batch.segment_ids[0] > 0]) == "evaluate me"
  expected = sum(len(text.encode()) + 1 for texts in corpus_documents(root).values() for text in texts)
  assert targets(load(root, **keys)) == expected


def test_unigram_numbers_equal_counting(root):
  counts = {split: Counter() for split in ("train", "eval")}
  for split, count in counts.items():
    loader = load(root, split)
    for index in range(loader.num_examples):
      for (_, target), number in pairs(loader.batch(*divmod_row(loader, index))).items():
        count[target] += number
  train, held_out = counts["train"], counts["eval"]
  entropy = -sum(n / train.total() * math.log(n / train.total()) for n in train.values())
  loss = -sum(n * math.log((train[t] + 1) / (train.total() + 258)) for t, n in held_out.items()) / held_out.total()
  assert loader.unigram_entropy() == pytest.approx(entropy, rel=1e-12)
  assert loader.unigram_eval_loss() == pytest.approx(loss, rel=1e-12)
  assert load(root, eval_fraction=0.0).unigram_eval_loss() is None


def test_bpe_is_trained_once_and_used(root):
  lines = []
  loader = load(root, tokenizer_type="bpe", vocab_size=330, log=lines.append)
  assert lines[0] == "Training a BPE tokenizer of 330 ids"
  assert loader.tokenizer.name == "bpe" and 258 < loader.tokenizer.vocab_size <= 330
  longer = load(root, "eval", tokenizer_type="bpe", vocab_size=330, max_target_length=64, log=lines.append)
  assert sum("Training" in line for line in lines) == 1
  assert longer.tokenizer.fingerprint == loader.tokenizer.fingerprint
  whole = [text for texts in corpus_documents(root).values() for text in texts]
  for index in range(loader.num_examples):
    batch = loader.batch(*divmod_row(loader, index))
    for segment in range(1, batch.segment_ids.max() + 1):
      part = loader.tokenizer.decode(batch.tokens[batch.segment_ids == segment]).strip("\ufffd")
      assert any(part in text for text in whole)


def test_bpe_with_a_given_file(root, tmp_path):
  path = tmp_path / "tokenizer.json"
  path.write_text(train_bpe(["some other text"], 300), encoding="utf-8")
  loader = load(root, tokenizer_type="bpe", tokenizer_path=str(path))
  text = loader.tokenizer.decode(loader.batch(0).tokens[0])
  assert "word" in text or "line" in text


def test_documents_do_not_depend_on_the_groups_that_they_are_tokenized_in(root, monkeypatch):
  whole = load(root)
  monkeypatch.setattr(prepare, "_GROUP", 120)
  groups = load(root, dataset_cache_directory=str(root.parent / "other"))
  assert groups.num_examples == whole.num_examples
  assert_equal(groups.batch(3), whole.batch(3))


def test_the_log_and_the_identity_tell_which_tokens_surround_documents(root, tmp_path):
  path = tmp_path / "tokenizer.json"
  path.write_text(train_bpe(["some other text"], 300), encoding="utf-8")
  keys = {"tokenizer_type": "bpe", "tokenizer_path": str(path), "packing": "none"}
  plain, changed = load(root, **keys), load(root, **keys, bos_token="none", eos_token="<|bos|>")
  again = load(root, **keys, bos_token="<|bos|>", eos_token="<|eos|>")
  assert plain.fingerprint() == again.fingerprint() != changed.fingerprint()
  for loader, begin, around in [
    (plain, "<|bos|>", r"begin with <\|bos\|> \(0\) and end with <\|eos\|> \(1\)\."),
    (changed, "", r"begin with no token and end with <\|bos\|> \(0\)\."),
  ]:
    (line,) = describe.documents(loader.describe(10))
    assert re.search(around, line)
    text = begin + loader.tokenizer.decode(loader.batch(0).tokens[0][:20])
    assert line.endswith(f"The first tokens: {text!r}")


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


@pytest.mark.parametrize("damage", ["truncated", "absent", "empty", "no meta", "bad meta", "shorter meta", "unlike"])
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
    case "empty":
      records.write_bytes(b"")
    case "no meta":
      meta.unlink()
    case "bad meta":
      meta.write_text("{")
    case "shorter meta":
      meta.write_text("[]")
    case "unlike":
      records.write_bytes(b"\x5a" * len(content))
  lines = []
  again = load(root, log=lines.append)
  assert "is damaged (" in lines[0] and "Making it again" in lines[0] and len(lines) == 3
  assert_equal(again.batch(0), expected)
  assert load(root, log=lines.append) and len(lines) == 3


def test_a_damaged_tokenizer_is_made_again(root):
  first = load(root, tokenizer_type="bpe")
  (path,) = (root.parent / "cache").glob("tokenizer-*/tokenizer.json")
  path.write_bytes(path.read_bytes()[:-100])
  lines = []
  assert load(root, tokenizer_type="bpe", log=lines.append).fingerprint() == first.fingerprint()
  assert len(lines) == 2 and "is damaged (" in lines[0]


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


def test_a_file_that_vanishes_stops_the_run(root):
  loader = load(root)
  (folder,) = entries(root)
  (folder / "train.records").unlink()
  with pytest.raises(DataError, match=r"step 3: .*train\.records cannot be read"):
    loader.batch(3)


def test_close_is_idempotent(root):
  loader = load(root)
  loader.batch(0)
  loader.close()
  loader.close()


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


@pytest.mark.parametrize("tokenizer_type", ["byte", "bpe"])
def test_far_too_little_text_is_refused_before_caching(tmp_path, tokenizer_type):
  (tmp_path / "corpus").mkdir()
  (tmp_path / "corpus" / "a.txt").write_text("hello")
  with pytest.raises(ConfigError, match="has at most 6 tokens to learn"):
    load(tmp_path / "corpus", eval_fraction=0.0, tokenizer_type=tokenizer_type)
  assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


def test_text_without_tokens_is_refused(tmp_path):
  (tmp_path / "corpus").mkdir()
  (tmp_path / "corpus" / "blank.jsonl").write_text('\n{"text": ""}\n')
  with pytest.raises(ConfigError, match="has 0 tokens to learn"):
    load(tmp_path / "corpus", eval_fraction=0.0, max_target_length=2)


def test_the_run_says_what_it_reads(root):
  loader = load(root)
  described = loader.describe(steps=3 * loader.num_examples)
  assert json.loads(json.dumps(described)) == {
    "dataset": str(root),
    "tokenizer": "byte",
    "tokenizer_vocab_size": 258,
    "bos_token": ["<|bos|>", 256],
    "eos_token": ["<|eos|>", 257],
    "first_tokens": loader.tokenizer.decode(loader.batch(0).tokens[0][:20], specials=True),
    "tokens": targets(loader),
    "density": targets(loader) / (loader.num_examples * LENGTH),
    "examples": loader.num_examples,
    "run_tokens": 3 * loader.num_examples * BATCH * LENGTH,
    "epochs": 3.0 * BATCH,
  }
  line = describe.line(described)
  for part in (str(root), "byte tokenizer with 258 ids", f"{targets(loader):,} tokens for training", "12 epochs"):
    assert part in line
  reused = load(root, reuse_example_batch=1).describe(steps=100)
  assert reused["epochs"] == BATCH / loader.num_examples
  held_out = load(root, eval_dataset_path=str(root / "file03.txt"), split="eval")
  assert held_out.describe(1)["dataset"].endswith("file03.txt")


def test_a_vocabulary_far_above_the_tokenizer_is_a_warning(root):
  """Qwen3 with the byte tokenizer used 258 of 151,936 rows without a warning."""
  described = load(root, vocab_size=151_936).describe(steps=1)
  warning = describe.vocabulary_warning(described, 151_936)
  for part in ("vocab_size=151,936", "258 ids of the byte tokenizer", "99.8%", "tokenizer_path", "Set vocab_size=258"):
    assert part in warning
  assert describe.vocabulary_warning(described, 512) is None  # padding
  assert describe.vocabulary_warning(described, 517) is not None


def test_has_eval(root):
  assert load(root).has_eval and load(root, "eval").has_eval and not load(root, eval_fraction=0.0).has_eval
  assert load(root, eval_fraction=0.0, eval_dataset_path=str(root / "file03.txt")).has_eval
  assert load(root, dataset_type="synthetic", eval_fraction=0.0).has_eval


RACER = """
import sys
from input_pipeline.options import DataOptions
from input_pipeline import datasets, prepared, workers
cfg = DataOptions.model_validate_json(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
folder, tokenizer = prepared.prepared(cfg, datasets.find(cfg), vocab_size=400, log=print, call=workers.here)
print(tokenizer.fingerprint, (folder / "meta.json").read_text().replace("\\n", ""))
"""


def test_racing_processes_tokenise_once_and_agree(root, python):
  racers = [python(RACER, section(root, tokenizer_type="bpe").model_dump_json()) for _ in range(3)]
  for racer in racers:
    assert racer.stdout.readline() == "ready\n"
  for racer in racers:
    racer.stdin.write("\n")
    racer.stdin.flush()
  outputs = [racer.communicate(timeout=120)[0].splitlines() for racer in racers]
  assert [racer.returncode for racer in racers] == [0, 0, 0]
  assert len({lines[-1] for lines in outputs}) == 1
  assert sum(line.startswith(("Training", "Tokenizing")) for lines in outputs for line in lines) == 3
  assert len(entries(root)) == len([*(root.parent / "cache").glob("tokenizer-*")]) == 1
  assert not [*(root.parent / "cache").glob(".*-*")]  # no unfinished folder


IMPORTS = """
import sys
from input_pipeline.loader import make_loader
heavy = ("jax", "tensorflow", "grain", "tokenizers", "array_record")
light = [name for name in heavy if name in sys.modules]
from input_pipeline.options import DataOptions
cfg = DataOptions.model_validate_json(sys.argv[1])
loader = make_loader(cfg, vocab_size=300, global_batch_size=4, split="train", log=lambda line: None)
before = set(sys.modules)
loader.batch(0)
print(light, "tensorflow" in sys.modules, len(set(sys.modules) - before))
"""


def test_imports_are_late_but_not_in_the_thread_that_reads(root, python):
  """The prefetch thread must not import modules that the main thread may be importing at the same time."""
  assert python(IMPORTS, section(root).model_dump_json()).communicate(timeout=120)[0].strip() == "[] False 0"


def test_the_standard_library_is_a_corpus(tmp_path):
  cfg = DataOptions(max_target_length=512, dataset_cache_directory=str(tmp_path))
  train, held_out = (make_loader(cfg, vocab_size=258, global_batch_size=16, split=split) for split in ("train", "eval"))
  assert train.num_examples > 10_000 and held_out.num_examples > 100
  assert 2.5 < train.unigram_entropy() < 4 and 2.5 < train.unigram_eval_loss() < 4
  batch = train.batch(0)
  assert batch.tokens.shape == (16, 512) and "self" in train.tokenizer.decode(batch.tokens.ravel())


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


def test_ctrl_c_waits_for_a_library_that_loads():
  went_on = False
  # A background job of a script ignores SIGINT, and Python does not change that.
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  try:
    with pytest.raises(KeyboardInterrupt), packages.uninterrupted():
      signal.raise_signal(signal.SIGINT)
      went_on = True
  finally:
    signal.signal(signal.SIGINT, before)
  assert went_on


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
  first = [int(source.example(index).tokens[0]) for index in range(5000)]
  tracemalloc.start()
  drawn = [int(source.example(index).tokens[0]) for index in range(count - 5000, count)]  # the end of the epoch
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  assert len({*first, *drawn}) == 10_000
  assert peak < 2_000_000
  # Uniform: the mean of 10,000 draws has a standard deviation of 0.0029 of the range.
  assert abs(np.mean(first + drawn) / count - 0.5) < 0.012
  assert [int(source.example(index).tokens[0]) for index in range(count, count + 100)] != first[:100]  # another epoch
