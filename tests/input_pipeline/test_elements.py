"""Datasets of others as data: each kind of MapDataset, what is refused, and what a resume notices."""

from __future__ import annotations

import itertools
import json
import pickle
import re
import sys
import threading
import time
from pathlib import Path

import cloudpickle
import grain
import numpy as np
import pytest
from tests.support import tfds_dataset
from tests.support.data_files import LENGTH, TEXTS, TOKENS, everything, load, tf_example_of, write_jsonl, write_records

from input_pipeline import elements
from input_pipeline.batch import Batch, DataError, Example
from input_pipeline.input_errors import ConfigError
from input_pipeline.loader import make_loader
from input_pipeline.options import DataOptions
from trainer.checkpoint.checkpoint_errors import ConfigMismatch
from trainer.config.schema import Config, DataSection
from trainer.run import run_data

MapDataset = grain.MapDataset
EVEN, ODD = TEXTS[::2], TEXTS[1::2]
THREES = [np.array([i, i + 1, i + 2]) for i in range(60)]


class Columns:
  """Rows as mappings with other fields, as a Hugging Face dataset gives them. Not a Sequence."""

  def __len__(self):
    return len(TEXTS)

  def __getitem__(self, number):
    return {"id": number, "text": TEXTS[number], "meta": {"source": "web"}}


class Fails:
  """Element 5 cannot be read."""

  def __len__(self):
    return len(TEXTS)

  def __getitem__(self, number):
    if number == 5:
      raise RuntimeError("the disk is gone")
    return TEXTS[number]


class Slow(Columns):
  def __init__(self):
    self.readers = set()

  def __getitem__(self, number):
    self.readers.add(threading.current_thread())
    time.sleep(0.01)
    return TEXTS[number]


def records(folder):
  path = write_records(folder / "records", [text.encode() for text in TEXTS])
  return MapDataset.source(grain.sources.ArrayRecordDataSource([path])).map(lambda record: record)


def tfds(folder):
  path = tfds_dataset.prepare(folder, TEXTS, TOKENS)
  return sys.modules["tensorflow_datasets"].builder_from_directory(path).as_data_source("train")


def memory_mapped(folder):
  np.save(folder / "rows.npy", np.stack(THREES))
  return np.load(folder / "rows.npy", mmap_mode="r")


KINDS = {  # the dataset, and its documents in order
  "a list": (lambda _: list(TEXTS), TEXTS),
  "a source": (lambda _: MapDataset.source(TEXTS), TEXTS),
  "map": (lambda _: MapDataset.range(40).map(lambda number: TEXTS[number]), TEXTS),
  "map with an index": (lambda _: MapDataset.source(TEXTS).map_with_index(lambda i, text: f"{i} {text}"),
                        [f"{i} {text}" for i, text in enumerate(TEXTS)]),
  "filter": (lambda _: MapDataset.source(TEXTS).filter(lambda text: int(text.split()[1]) % 2 == 1), ODD),
  "shuffle": (lambda _: MapDataset.source(TEXTS).shuffle(seed=3), None),
  "random map": (lambda _: MapDataset.source(TEXTS).seed(1).random_map(lambda t, rng: f"{t} {rng.integers(9)}"), None),
  "repeat": (lambda _: MapDataset.source(TEXTS).repeat(2), TEXTS * 2),
  "slice": (lambda _: MapDataset.source(TEXTS)[1::2], ODD),
  "mix": (lambda _: MapDataset.mix([MapDataset.source(EVEN), MapDataset.source(ODD)], [0.5, 0.5]), TEXTS),
  "concatenate": (lambda _: MapDataset.concatenate([MapDataset.source(EVEN), MapDataset.source(ODD)]), EVEN + ODD),
  "ArrayRecord": (records, TEXTS),
  "TFDS": (tfds, None),
  "rows of a table": (lambda _: Columns(), TEXTS),
  "a memory-mapped array": (memory_mapped, THREES),
  "ids": (lambda _: MapDataset.source(THREES), THREES),
  "lists of ids": (lambda _: [{"text": ids.tolist()} for ids in THREES], THREES),
  "bytes": (lambda _: [text.encode() for text in TEXTS], TEXTS),
  "None among them": (lambda _: [None, TEXTS[0], None, *TEXTS[1:]], TEXTS),
  "slow": (lambda _: Slow(), TEXTS),
}  # fmt: skip


def of(folder, dataset, batch=4, split="train", vocab_size=300, **keys):
  keys = {"max_target_length": LENGTH, "dataset_cache_directory": str(folder / "cache"), **keys}
  return make_loader(
    DataOptions(**keys),
    vocab_size=vocab_size,
    global_batch_size=batch,
    split=split,
    dataset=dataset,
    log=lambda _: None,
  )


@pytest.mark.parametrize("kind", KINDS)
def test_documents_become_the_examples_of_the_same_documents_in_a_file(kind, tmp_path):
  make, expected = KINDS[kind]
  dataset = make(tmp_path)
  keys = {"train_data_columns": "body"} if kind == "TFDS" else {}
  found = everything(of(tmp_path, dataset, **keys))
  if expected is None:
    expected = [dataset[number] for number in range(len(dataset))]
    expected = [one["body"].decode() if isinstance(one, dict) else one for one in expected]
    assert kind == "random map" or sorted(expected) == sorted(TEXTS)
  file = write_jsonl(tmp_path / "same", "text", expected)
  other = load(tmp_path, grain_train_files=file, grain_file_type="jsonl", max_target_length=LENGTH)
  assert found == everything(other)


def test_slow_documents_are_read_by_several_threads(tmp_path):
  slow = Slow()
  of(tmp_path, slow)
  assert len(slow.readers) > 4


def test_an_element_that_cannot_be_read_is_a_bad_record(tmp_path):
  with pytest.raises(ConfigError, match=r"element 5 of Fails cannot be read \(RuntimeError: the disk is gone\)"):
    of(tmp_path, Fails())
  found = everything(of(tmp_path, Fails(), max_bad_records=1))
  file = write_jsonl(tmp_path / "same", "text", TEXTS[:5] + TEXTS[6:])
  assert found == everything(load(tmp_path, grain_train_files=file, grain_file_type="jsonl"))


def test_tokens_outside_the_mask_have_weight_0(tmp_path):
  pairs = [([10, 11, 12, 13], [0, 0, 1, 1]), ([20, 21], [1, 0])]
  for dataset in (pairs, [{"text": ids, "mask": np.array(mask, bool)} for ids, mask in pairs]):
    loader = of(tmp_path, dataset, packing="none", max_target_length=4, batch=2)
    rows = {row[0]: (row, weights) for row, weights in zip(loader.batch(0).tokens.tolist(), loader.batch(0).weights)}
    assert rows[10][0] == [10, 11, 12, 0] and rows[10][1].tolist() == [0, 1, 1, 0]
    assert rows[20][0] == [20, 0, 0, 0] and rows[20][1].tolist() == [0, 0, 0, 0]


MASKED = [{"ids": [10 + n, 11, 12, 13], "mask": [n % 2, 0, 1, 1]} for n in range(20)]


def as_field(name: str, row: dict) -> list[int]:
  """What a field with this name says as the mask does."""
  return [id if one else -100 for id, one in zip(row["ids"], row["mask"])] if name == "labels" else row["mask"]


@pytest.mark.parametrize("name", ["mask", "loss_mask", "completion_mask", "assistant_masks", "labels", "meta.mask"])
def test_the_mask_of_a_record_is_used_in_each_format(tmp_path, name):
  arrow, parquet = (pytest.importorskip(one, reason="bash setup.sh --arrow") for one in ("pyarrow", "pyarrow.parquet"))
  rows = [{"body": row["ids"], name: as_field(name, row), "attention_mask": [1] * 4, "id": 1} for row in MASKED]
  column, flat = "body", rows
  if "." in name:
    column, rows = "meta.body", [{"meta": {"body": row["ids"], "mask": row["mask"]}} for row in MASKED]
  want = everything(of(tmp_path, [(row["ids"], row["mask"]) for row in MASKED], packing="none", max_target_length=4))
  (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "a.parquet")
  files = {"jsonl": tmp_path / "a.jsonl", "parquet": tmp_path / "a.parquet"}
  if rows is flat:
    examples = [tf_example_of({key: np.array(value) for key, value in row.items() if key != "id"}) for row in rows]
    files["arrayrecord"] = Path(write_records(tmp_path / "a", examples))
  for kind, file in files.items():
    keys = {"grain_train_files": str(file), "grain_file_type": kind, "train_data_columns": column}
    assert everything(load(tmp_path, packing="none", max_target_length=4, **keys)) == want


@pytest.mark.parametrize(
  ("row", "message"),
  [
    ({"text": "a", "loss_mask": [0]}, "it has loss_mask beside a text. Give the token ids"),
    ({"text": "a", "train": False}, "it has train=false. Leave out records"),
    ({"text": [1, 2], "mask": [0.5, 1]}, "its mask has other values than 0 and 1"),
    ({"text": [1, 2], "mask": [1]}, r"its mask has shape \(1,\), and its ids \(2,\)"),
    ({"text": [1, 2], "mask": [1, 0], "loss_mask": [1, 1]}, "its mask, loss_mask contradict each other"),
    ({"text": [1, 2], "labels": [2, -100]}, "its labels are other tokens than its ids"),
    ({"text": [1, 2], "attention_mask": [1, 0]}, "its attention_mask has zeros"),
    ({"text": [1, 2, [3]]}, "its text is a list of unlike parts"),
    ({"text": [{"role": "user", "content": "a"}], "mask": [1]}, "it has mask beside messages"),
  ],
)
def test_fields_that_say_what_is_trained_are_used_or_refused(tmp_path, row, message):
  (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
  with pytest.raises(ConfigError, match=f"a.jsonl:1: {message}"):
    load(tmp_path, grain_train_files=f"{tmp_path}/a.jsonl", grain_file_type="jsonl")


def test_a_document_with_a_mask_after_one_without_is_refused_in_a_file(tmp_path):
  rows = [{"text": [1, 2]}, {"text": [1, 2], "mask": [1, 0]}]
  (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  with pytest.raises(ConfigError, match=r"document 2 of .* is token ids with a mask, and documents before it are not"):
    load(tmp_path, grain_train_files=f"{tmp_path}/a.jsonl", grain_file_type="jsonl")


def test_a_slice_of_shuffled_examples_stays_a_slice_in_later_epochs(tmp_path):
  """https://github.com/google/grain/issues/1200: element `len` and the ones after it may be held-out examples."""
  numbers = MapDataset.range(1, 21).shuffle(seed=3)
  row = lambda number: {"inputs": [number], "targets": [number]}
  loader = of(tmp_path, numbers[:8].map(row), max_target_length=1, batch=4)
  epochs = [np.concatenate([loader.batch(2 * epoch + half).tokens for half in (0, 1)]) for epoch in range(5)]
  assert set(epochs[0].ravel()) == {int(numbers[place]) for place in range(8)}
  assert all(np.array_equal(epochs[0], other) for other in epochs[1:])
  with pytest.raises(ConfigError, match="elements outside the slice"):
    of(tmp_path, numbers[:8].map(row).repeat(2), max_target_length=1, batch=4)
  whole = of(tmp_path, numbers.map(row), max_target_length=1, batch=4)
  first, second = (np.concatenate([whole.batch(5 * epoch + n).tokens for n in range(5)]) for epoch in (0, 1))
  assert sorted(first.ravel()) == sorted(second.ravel()) and not np.array_equal(first, second)


def test_rows_with_messages_are_conversations():
  found = elements.document({"chat": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "chat")
  assert found.messages[1] == {"role": "assistant", "content": "b"}


def test_the_example_of_the_readme(tmp_path, monkeypatch, capsys):
  page = (Path(elements.__file__).parent / "README.md").read_text()
  (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
  assert len(code.splitlines()) <= 10
  monkeypatch.chdir(tmp_path)
  exec(code, {})
  assert capsys.readouterr().out.endswith("(8, 64)\n" * 3)


def same(number):
  return {"inputs": [number, 2, 3, 0], "targets": [2, 3, 4, 0], "inputs_segmentation": [1, 2, 2, 0],
          "targets_segmentation": [1, 0, 2, 0], "inputs_position": [0, 0, 1, 0]}  # fmt: skip


ARRAYS = [([7, 2, 3, 0], np.int32), ([2, 3, 4, 0], np.int32), ([1, 0, 1, 0], np.float32), ([0, 0, 1, 0], np.int32),
          ([1, 2, 2, 0], np.int32)]  # fmt: skip
OURS = Example(*(np.array(*array) for array in ARRAYS))
LEAST = {"tokens": [7, 2, 3], "targets": [2, 3, 4], "segment_ids": [1, 2, 2], "weights": [1.0, 0, 1]}


@pytest.mark.parametrize("element", [same(7), OURS, OURS._asdict(), LEAST], ids=["MaxText", "tuple", "dict", "short"])
def test_the_fields_of_an_example(element, tmp_path):
  batch = of(tmp_path, [element], max_target_length=4, batch=2).batch(0)
  for name, found, (expected, dtype) in zip(Batch._fields, batch, ARRAYS, strict=True):
    assert found.dtype == dtype and found.tolist() == [expected] * 2, name


def numbers(loader, steps):
  return [loader.batch(step).tokens[:, 0].tolist() for step in steps]


def examples(count=10):
  return MapDataset.range(count).map(same)


def test_examples_come_in_the_order_of_the_dataset_and_then_of_its_next_epoch(tmp_path):
  keys = {"max_target_length": 4, "batch": 5}
  assert numbers(of(tmp_path, examples(), **keys), range(3)) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [0, 1, 2, 3, 4]]
  shuffled = numbers(of(tmp_path, examples().shuffle(seed=1), **keys), range(4))
  first, second = (list(itertools.chain(*shuffled[i : i + 2])) for i in (0, 2))
  assert sorted(first) == sorted(second) == list(range(10)) and first != second
  endless = of(tmp_path, examples().shuffle(seed=1).repeat(), **keys)
  assert numbers(endless, range(4)) == shuffled and endless.num_examples is None
  assert numbers(of(tmp_path, examples(), split="eval", **keys), range(3))[2] == [0] * 5, "evaluation data have an end"


def test_a_filtered_example_is_a_row_of_padding(tmp_path):
  loader = of(tmp_path, examples(4).filter(lambda one: one["inputs"][0] != 2), max_target_length=4)
  batch = loader.batch(0)
  assert batch.tokens[:, 0].tolist() == [0, 1, 0, 3] and not batch.weights[2].any() and not batch.segment_ids[2].any()


def not_deterministic():
  count = itertools.count()
  return MapDataset.range(9).map(lambda number: f"text {number} {next(count)}")


@pytest.mark.parametrize(
  ("dataset", "message"),
  [
    (lambda: examples().to_iter_dataset(), "is an iterator: it has a state.*\nGive the grain.MapDataset before"),
    (lambda: iter(TEXTS), "list_iterator is an iterator"),
    (lambda: (text for text in TEXTS), "generator is an iterator"),
    (lambda: 5, "5 is not read by index"),
    (lambda: {0: "a"}, "is not read by index"),
    (list, "has no elements"),
    (lambda: MapDataset.source([]), "has no elements"),
    (lambda: MapDataset.source(TEXTS).filter(lambda _: False), "all elements that were looked at are None"),
    (lambda: examples().batch(2), r"tokens have shape \(4, 2\).* before .batch"),
    (lambda: MapDataset.source(THREES).batch(2), r"with shape \(2, 3\).* before .batch"),
    (lambda: MapDataset.source(TEXTS).repeat(), "is endless.\nGive documents before .repeat"),
    (not_deterministic, "element 0 is another one when it is read again"),
    (lambda: [1.5, 2.5], "it is a float. A document is"),
    (lambda: [np.array([0.5, 1])], "it is a ndarray of float64"),
    (lambda: [{"body": "a"}], 'no field "text"; it has body. Set train_data_columns'),
    (lambda: [([1, 2], [1])], r"its mask has shape \(1,\), and its ids \(2,\)"),
    (lambda: [([1, -2], [1, 1])], "it has the token -2"),
    (lambda: [{"text": "a", "mask": [1]}], "it has mask beside a text. Give the token ids"),
    (lambda: ["a", [1, 2, 3]], "is token ids, and documents before it are not"),
    (lambda: [[1, 2, 400]], "it has the token 400"),
    (lambda: [{"inputs": [1] * 25, "targets": [1] * 25}], "at most max_target_length=24"),
    (lambda: [{"inputs": [1, 2], "targets": [1]}], r"its targets are int64 with shape \(1,\). Give 2 integers"),
    (lambda: [{"inputs": [1, 300], "targets": [1, 1]}], "its tokens are from 1 to 300. Give numbers from 0 to 300 - 1"),
    (lambda: [{"inputs": [1.5], "targets": [1]}], "its tokens are float64"),
    (lambda: [{"tokens": [1], "targets": [1], "weights": [np.nan]}], "its weights are from nan"),
  ],
)  # fmt: skip
def test_refused(dataset, message, tmp_path):
  with pytest.raises(ConfigError, match=f"(?s){message}"):
    of(tmp_path, dataset(), batch=1)


def test_an_example_of_another_type_ends_the_run_at_its_step(tmp_path):
  loader = of(tmp_path, [*map(same, range(9)), "a text"], max_target_length=4, batch=5)
  loader.batch(0)
  with pytest.raises(DataError, match="step 1: element 9 of list: it is a str without inputs and targets"):
    loader.batch(1)


def test_batches_are_the_same_in_another_process(tmp_path):
  for dataset in (examples(), MapDataset.source(TEXTS), grain.MapDataset.source(THREES)):
    loader = of(tmp_path, dataset, max_target_length=4)
    if isinstance(loader._source, elements.ElementsSource):
      continue  # a dataset without a reference stays in its process
    again = pickle.loads(cloudpickle.dumps(loader)).dataset()
    assert all(np.array_equal(*pair) for pair in zip(again[5], loader.batch(5)))


# ---- grain_dataset, resumes


@pytest.fixture
def module(tmp_path, monkeypatch):
  """Writes a module of a user and puts it where it is imported."""
  monkeypatch.syspath_prepend(str(tmp_path))
  monkeypatch.setattr(sys, "dont_write_bytecode", True)  # a file of the same second and size would not be read again

  def write(code: str) -> str:
    sys.modules.pop("their_data", None)
    (tmp_path / "their_data.py").write_text(f"import grain\n{code}")
    return "their_data:dataset"

  yield write
  sys.modules.pop("their_data", None)


TEXT_CODE = "def dataset():\n  return grain.MapDataset.range({}).map(lambda i: f'text number {{i}}')\n"
EXAMPLE_CODE = """
def dataset():
  return grain.MapDataset.range({}).map(lambda i: {{"inputs": [i, 1, 2], "targets": [1, 2, 3]}})
"""


@pytest.mark.parametrize(
  ("code", "message"),
  [
    ("", "this process cannot call it.*no attribute 'dataset'"),
    (
      "import not_installed_here",
      "No module named 'not_installed_here'.*install its package, and what it needs, on every host",
    ),
    ("def dataset(): raise KeyError('x')", "KeyError: 'x'"),
    ("def dataset(): return grain.MapDataset.range(3).to_iter_dataset()", "is an iterator"),
    ("def dataset(): return ['a']\ndataset.fingerprint = 5", "its fingerprint is 5"),
  ],
)
def test_functions_that_are_refused(code, message, module, tmp_path):
  with pytest.raises(ConfigError, match=f"(?s)grain_dataset=their_data:dataset.*{message}"):
    load(tmp_path, grain_dataset=module(code))


def open_run(folder: Path, batch: int, **keys):
  """The data of a run."""
  cfg = Config()
  section = DataSection(
    dataset_type="grain", max_target_length=8, dataset_cache_directory=str(folder / "cache"), **keys
  )
  model = cfg.model.model_copy(update={"vocab_size": 300})
  run = cfg.run.model_copy(update={"allow_config_change": "global_batch_size"})
  config = cfg.model_copy(update={"data": section, "model": model, "run": run})
  run_data.check(config)
  return config, run_data.open_data(config, batch, lambda _: None)


def test_processes_with_other_data_do_not_train_together(module, tmp_path):
  _, opened = open_run(tmp_path, 4, grain_dataset=module(TEXT_CODE.format(50)))
  with opened as data:
    data.require_equal([data.identity, json.loads(json.dumps(data.identity))])
    with pytest.raises(ConfigError, match=r"The processes of this run have other data: .*\nGive each process"):
      data.require_equal([data.identity, {**data.identity, "data": "0" * 64}])


def saved(folder, batch, step, **keys):
  config, opened = open_run(folder, batch, **keys)
  with opened as data:
    return [data.train.batch(n).tokens for n in range(step)], json.loads(json.dumps(data.meta(config, step)))


@pytest.mark.parametrize("code", [TEXT_CODE, EXAMPLE_CODE], ids=["documents", "examples"])
def test_a_resume_with_another_batch_reads_the_next_examples(code, module, tmp_path):
  keys = {"grain_dataset": module(code.format(50))}
  whole, _ = saved(tmp_path, 4, 9, **keys)
  _, meta = saved(tmp_path, 4, 3, **keys)
  config, opened = open_run(tmp_path, 2, **keys)
  with opened as data:
    data.accept(config, meta)
    assert "match the checkpoint" in data.resume(3, meta)[0]
    rest = [data.train.batch(step).tokens for step in range(3, 15)]
  assert np.array_equal(np.concatenate(rest), np.concatenate(whole[3:]))


@pytest.mark.parametrize("code", [TEXT_CODE, EXAMPLE_CODE], ids=["documents", "examples"])
@pytest.mark.parametrize("other", [51, "fingerprint"])
def test_a_resume_of_another_dataset_is_refused(code, other, module, tmp_path):
  """It has grown since, or says itself that it is another one."""
  _, meta = saved(tmp_path, 4, 3, grain_dataset=module(code.format(50)))
  stated = "dataset.fingerprint = 'version 2'" if other == "fingerprint" else ""
  config, opened = open_run(tmp_path, 4, grain_dataset=module(code.format(51 if other == 51 else 50) + stated))
  with opened as data:
    if code == TEXT_CODE and other == "fingerprint":  # the documents were read again, and are the same
      assert all(line.startswith("grain_") for line in data.accept(config, meta))
      return
    with pytest.raises(ConfigMismatch, match="data"):
      data.accept(config, meta)


def test_a_change_between_the_places_of_the_fingerprint(module, tmp_path):
  """Examples 13 to 16 are others, and none is at a fixed place: the hash of the next examples shows it."""
  code = EXAMPLE_CODE.format(1000)
  _, meta = saved(tmp_path, 4, 3, grain_dataset=module(code))
  config, opened = open_run(tmp_path, 4, grain_dataset=module(code.replace("[i, 1, 2]", "[i, 1 + (11 < i < 17), 2]")))
  with opened as data:
    data.accept(config, meta)
    with pytest.raises(ConfigMismatch, match="example 12 and the examples after it differ"):
      data.resume(3, meta)


def test_a_mixture_with_files_reads_each_example_once(module, tmp_path):
  (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": [200 + i, 7]}) for i in range(20)))
  sources = {
    "theirs": {"weight": 1, "grain_dataset": module(EXAMPLE_CODE.format(30)), "epochs": 1},
    "files": {"weight": 1, "grain_train_files": f"{tmp_path}/texts.jsonl", "grain_file_type": "jsonl", "epochs": 1},
  }
  (tmp_path / "mixture.json").write_text(json.dumps(sources))
  _, opened = open_run(tmp_path, 5, grain_train_mixture_config_path=str(tmp_path / "mixture.json"), packing="none")
  with opened as data:
    found = np.concatenate([data.train.batch(step).tokens[:, 0] for step in range(data.train.last_step())])
  assert sorted(found.tolist()) == [*range(30), *range(200, 220)]
