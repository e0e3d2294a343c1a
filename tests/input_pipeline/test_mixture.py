"""Mixtures: proportions over every range, limits of epochs, resumes, and changes that repeat nothing."""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from end_to_end.histories import data as data_histories
from hypothesis import given, settings
from hypothesis import strategies as st

from input_pipeline.loader import Loader, check, make_loader
from input_pipeline.schedule import Schedule
from trainer.config import mixture_files as mixture_file
from trainer.config.errors import ConfigError
from trainer.config.schema import DataSection

LENGTH, VOCAB = 8, 400_000


# ---- the schedule


@settings(deadline=None)
@given(parts=st.lists(st.integers(1, 40), min_size=1, max_size=8))
def test_every_prefix_is_proportional_within_one_example(parts):
  schedule, total = Schedule(parts), sum(parts)
  order = [schedule.locate(index) for index in range(2 * total + 3)]
  counts = np.zeros((len(order) + 1, len(parts)), np.int64)
  for index, (source, rank) in enumerate(order):
    assert rank == counts[index, source]  # nothing is lost or repeated
    assert schedule.index_of(source, rank) == index
    counts[index + 1] = counts[index]
    counts[index + 1, source] += 1
    assert schedule.counts(index + 1) == counts[index + 1].tolist()
  ideal = np.arange(len(order) + 1)[:, None] * np.array(parts) / total
  assert np.abs(counts - ideal).max() < 1
  np.testing.assert_array_equal(counts[total], parts)
  # The error over a range is the difference of the errors of two prefixes.
  errors = counts - ideal
  spread = errors.max(axis=0) - errors.min(axis=0)
  assert spread.max() < (1 + 1e-9 if len(parts) == 2 else 2)


# ---- mixtures of files


def write(folder: Path, name: str, documents: int, first: int) -> str:
  """A JSONL file of documents with one example each. Its tokens name the document: first, first + 1, .."""
  lines = [json.dumps({"text": [number] * LENGTH + [0]}) for number in range(first, first + documents)]
  (folder / f"{name}.jsonl").write_text("\n".join(lines))
  return str(folder / f"{name}.jsonl")


def section(folder: Path, sources: dict[str, dict], **keys) -> DataSection:
  path = folder / "mixture.yml"
  path.write_text(json.dumps(sources))  # JSON is YAML
  return DataSection(
    dataset_type="grain", grain_file_type="jsonl", grain_train_mixture_config_path=str(path),
    max_target_length=LENGTH, dataset_cache_directory=str(folder / "cache"), **{"packing": "none", **keys},
  )  # fmt: skip


def opened(cfg: DataSection, vocab_size: int, batch: int) -> Loader:
  """The training loader of a mixture."""
  return make_loader(
    cfg, vocab_size=vocab_size, global_batch_size=batch, split="train", mixture=mixture_file.read(cfg),
    log=lambda line: None,
  )  # fmt: skip


def load(folder: Path, sources: dict[str, dict], batch: int = 4, **keys) -> Loader:
  cfg = section(folder, sources, **keys)
  check([entry.options for entry in mixture_file.read(cfg)], VOCAB)
  return opened(cfg, VOCAB, batch)


def read(loader: Loader, first: int, last: int) -> list[int]:
  """The documents of the steps first to last - 1, in order."""
  return [int(row[0]) for step in range(first, last) for row in loader.batch(step).tokens]


@pytest.fixture
def files(tmp_path) -> dict[str, str]:
  sizes = {"web": 1000, "code": 200, "maths": 30}
  return {name: write(tmp_path, name, size, 1000 * number) for number, (name, size) in enumerate(sizes.items(), 1)}


def test_examples_come_in_proportion_and_each_once_per_epoch(tmp_path, files):
  loader = load(tmp_path, {"web": {"weight": 7, "path": files["web"]}, "code": {"weight": 3, "path": files["code"]}})
  documents = read(loader, 0, 100)
  from_code = [number for number in documents if number // 1000 == 2]
  assert len(from_code) == 120 and len(set(from_code)) == 120
  assert len(set(documents)) == 400
  assert sorted(from_code + [n for n in read(loader, 100, 170) if n // 1000 == 2])[::-1][:4] == [2199, 2198, 2197, 2196]
  assert loader.examples_by_source(100) == {"web": 280, "code": 120}
  assert loader.cursor(100)["mixture"]["members"]["code"]["count"] == 120


def test_a_source_with_a_limit_leaves_and_the_others_keep_their_proportions(tmp_path, files):
  sources = {
    "web": {"weight": 4, "path": files["web"]},
    "code": {"weight": 2, "path": files["code"]},
    "maths": {"weight": 2, "path": files["maths"], "epochs": 2},
  }
  documents = read(load(tmp_path, sources), 0, 150)
  maths = [index for index, number in enumerate(documents) if number // 1000 == 3]
  assert Counter(documents[index] for index in maths) == Counter({3000 + n: 2 for n in range(30)})
  assert maths[-1] < 240
  after = Counter(number // 1000 for number in documents[maths[-1] + 1 :][:300])
  assert after == {1: 200, 2: 100}


def test_adding_a_source_repeats_and_loses_nothing(tmp_path, files):
  """The sources that stay are renamed and reordered, their weights change, one is removed, and later one returns."""
  before = {"web": {"weight": 3, "path": files["web"]}, "maths": {"weight": 1, "path": files["maths"]}}
  loader = load(tmp_path, before)
  documents, cursor = read(loader, 0, 20), json.loads(json.dumps(loader.cursor(20)))
  changed = load(tmp_path, {"code": {"weight": 1, "path": files["code"]}, "pages": {"weight": 1, "path": files["web"]}})
  lines = changed.resume(20, cursor, same=False)
  assert lines == [
    "The mixture changes at example 80.",
    "Mixture: code is new",
    "Mixture: pages continues at its example 60",
    "Mixture: maths is removed after 20 examples",
  ]
  documents += read(changed, 20, 60)
  assert len(set(documents)) == len(documents)
  assert changed.examples_by_source(60) == {"code": 80, "pages": 140}
  # The order of "web" is that of web alone.
  alone = load(tmp_path, {"web": {"weight": 1, "path": files["web"]}})
  assert [number for number in documents if number // 1000 == 1] == read(alone, 0, 35)
  # A later resume of the changed mixture continues as if it had not been interrupted.
  resumed = load(tmp_path, {"code": {"weight": 1, "path": files["code"]}, "pages": {"weight": 1, "path": files["web"]}})
  cursor = json.loads(json.dumps(changed.cursor(33)))
  assert resumed.resume(33, cursor, same=True) == []
  assert read(resumed, 33, 60) == read(changed, 33, 60)
  assert resumed.cursor(40) == changed.cursor(40)


def test_sources_of_all_kinds_share_a_tokenizer(tmp_path, files):
  (tmp_path / "text").mkdir()
  (tmp_path / "text" / "a.txt").write_text("words " * 100)
  sources = {
    "tokens": {"weight": 1, "path": files["web"]},
    "text": {"weight": 1, "dataset_type": "text", "dataset_path": str(tmp_path / "text")},
  }
  loader = load(tmp_path, sources, grain_eval_files=files["maths"])
  assert loader.tokenizer.name == "byte" and loader.describe(10)["tokens"] is None
  assert loader.describe(10)["dataset"] == "mixture of tokens 50 %, text 50 %"
  assert "words" in loader.tokenizer.decode(loader.batch(0).tokens.ravel())
  cfg = section(tmp_path, sources, grain_eval_files=files["maths"])
  evaluation = make_loader(cfg, vocab_size=VOCAB, global_batch_size=4, split="eval", log=lambda line: None)
  assert evaluation.num_examples == 30 and {n // 1000 for n in read(evaluation, 0, 7)} == {3}


def test_a_damaged_record_names_the_source(tmp_path, files):
  loader = load(tmp_path, {"web": {"weight": 1, "path": files["web"]}})
  (path,) = (tmp_path / "cache").glob("corpus-*/train.records")
  path.write_bytes(bytes(path.stat().st_size))
  with pytest.raises(RuntimeError, match=r"step 3: web: record \d+ of .*train.records cannot be read"):
    loader.batch(3)


@pytest.mark.parametrize(
  ("entry", "message"),
  [
    ({"weight": 0, "path": "web"}, r"mixture.yml line 1: weight is 0.\nGive a number above 0"),
    ({"weight": 1}, "web has no files"),
    ({"weight": 1, "path": "web", "epochs": 0.0001}, "epochs=0.0001 of its 1000 examples is not one example"),
    ({"weight": 1, "pth": "web"}, "pth is not a key of a source with dataset_type=grain"),
    (
      {"weight": 1, "dataset_type": "text", "path": "web"},
      "grain_train_files is not a key of a source with dataset_type=t",
    ),
    ({"weight": 1, "dataset_type": "synthetic"}, "Choices in this file: grain, text, tfds, hf"),
    ({"weight": 1, "path": "gone"}, "'gone' has no files"),
    ({"weight": 1, "path": "code"}, "code and web have the same data"),
  ],
)
def test_wrong_mixtures_are_refused(tmp_path, files, entry, message):
  if isinstance(entry, dict) and isinstance(entry.get("path"), str):
    entry = entry | {"path": files.get(entry["path"], entry["path"])}
  sources = {"code": {"weight": 1, "path": files["code"]}, "web": entry}
  with pytest.raises(ConfigError, match=message):
    load(tmp_path, sources)


@pytest.mark.parametrize("sizes", [(900, 890), (300, 300)])
def test_two_views_of_the_same_documents_are_not_read_side_by_side(tmp_path, sizes):
  """Also if their first documents are equal, which a view that only cleans text may have."""
  texts = [[number] * LENGTH + [0] for number in range(max(sizes))]
  for name, size in zip("ab", sizes):
    lines = [json.dumps({"text": text, "copy": [text[0] + 1000 * (name == "b" and text[0] > 0)] * 9}) for text in texts]
    (tmp_path / f"{name}.jsonl").write_text("\n".join(lines[:size]))
  sources = {name: {"weight": 1, "path": f"{tmp_path}/{name}.jsonl", "train_data_columns": "copy"} for name in "ab"}
  documents = np.array(read(load(tmp_path, sources, batch=2), 0, min(sizes))) % 1000
  assert (documents[::2] == documents[1::2]).sum() <= 10  # 1 by chance
  alone = load(tmp_path, {"b": sources["b"]}, batch=1)
  if sizes[0] != sizes[1]:  # otherwise the source that comes first has the order that it has alone
    assert read(alone, 0, 50) == read(load(tmp_path, sources, batch=2), 0, 50)[1::2]


# ---- weights that change


def test_weights_change_at_their_steps_and_every_phase_is_proportional(tmp_path, files):
  sources = {
    "web": {"weight": "7, 1 @ 20, 0 @ 60", "path": files["web"]},
    "code": {"weight": "3, 1 @ 20", "path": files["code"]},
    "maths": {"weight": "0, 2 @ 30", "path": files["maths"]},
  }
  loader = load(tmp_path, sources)
  documents = read(loader, 0, 80)
  expected = {(0, 20): (7, 3, 0), (20, 30): (1, 1, 0), (30, 60): (1, 1, 2), (60, 80): (0, 1, 2)}
  for (first, last), weights in expected.items():
    found = Counter()
    for place, number in enumerate(documents[4 * first : 4 * last], 1):
      found[number // 1000] += 1
      for source, weight in enumerate(weights, 1):
        assert abs(found[source] - place * Fraction(weight, sum(weights))) < 1, (first, place)
  # Each source continues its own order through all phases.
  alone = load(tmp_path, {"web": {"weight": 1, "path": files["web"]}})
  from_web = [number for number in documents if number // 1000 == 1]
  assert from_web == read(alone, 0, 50)[: len(from_web)] and len(from_web) == 56 + 20 + 30
  counts = Counter(number // 1000 for number in documents)
  assert loader.examples_by_source(80) == {"web": counts[1], "code": counts[2], "maths": counts[3]}
  assert "from step 30 web 25 %, code 25 %, maths 50 %" in loader.describe(1)["dataset"]
  for first in (0, 19, 20, 21, 45, 79):
    resumed = load(tmp_path, sources)
    cursor = json.loads(json.dumps(loader.cursor(first)))
    assert resumed.resume(first, cursor, same=True) == []
    assert read(resumed, first, 80) == documents[4 * first :]
    assert resumed.cursor(80) == loader.cursor(80)


@pytest.mark.parametrize(("first", "second"), [(7, 1), (3, 4)])
def test_a_resume_with_another_batch_size_continues_the_order(tmp_path, files, first, second):
  """A mixture without changes has one order of examples, whatever the batch size, and it starts with the run."""
  weights = {"web": "0.61", "code": "0.29", "maths": "0.10"}
  sources = {name: {"weight": weight, "path": files[name]} for name, weight in weights.items()}
  loader = load(tmp_path, sources, batch=first)
  cursor = json.loads(json.dumps(loader.cursor(7)))
  resumed = load(tmp_path, sources, batch=second)
  assert resumed.resume(7, cursor, same=True) == []
  counts = {name: member["count"] for name, member in cursor["mixture"]["members"].items()}
  assert resumed.examples_by_source(7) == counts
  assert read(resumed, 7, 27) == read(load(tmp_path, sources, batch=1), 7 * first, 7 * first + 20 * second)
  # A second resume, with the first batch size.
  cursor = json.loads(json.dumps(resumed.cursor(27)))
  loader.resume(27, cursor, same=True)
  assert loader.cursor(27)["mixture"]["members"] == cursor["mixture"]["members"]


@pytest.mark.parametrize(
  "weight",
  ["", "1, 2", "1 @ 5", "1, 2 @ 0", "1, 2 @ 9, 3 @ 9", "1, -1 @ 5", "0, 0 @ 5", "1, inf @ 3", "1, 2 @ x", "1e999"],
)
def test_wrong_weights_are_refused(tmp_path, files, weight):
  with pytest.raises(ConfigError, match=r"weight is .*\n.*such as `weight: '0.7, 0.3 @ 1000'`"):
    load(tmp_path, {"web": {"weight": weight, "path": files["web"]}})


# ---- any history


@pytest.fixture(scope="module")
def corpora(tmp_path_factory) -> Path:
  folder = tmp_path_factory.mktemp("histories")
  data_histories.write_sources(folder)
  return folder


@settings(deadline=None, max_examples=8)
@given(history=data_histories.histories())
def test_any_history_gives_the_order_of_the_undisturbed_run(corpora, history):
  data_histories.check_history(corpora, history)
