"""A checkpoint has a hash of the next examples, and a resume compares it."""

from __future__ import annotations

import copy
import hashlib
import json
import random
from pathlib import Path

import grain
import numpy as np
import pytest
from tests.support.command import last_of_each

from input_pipeline import order
from input_pipeline.loader import Loader
from trainer.checkpoint.errors import ConfigMismatch
from trainer.config.load import load
from trainer.run import run_data

KEYS = "dataset_type=grain grain_file_type=jsonl vocab_size=300 max_target_length=16 packing=none".split()


def opened(folder: Path, *keys: str, batch: int = 4):
  places = [f"grain_train_files={folder}/a.jsonl", f"base_output_directory={folder}/runs"]
  cache = [] if any(key.startswith("dataset_cache") for key in keys) else [f"dataset_cache_directory={folder}/cache"]
  config = load(["configs/base.yml", *last_of_each([*KEYS, *places, *cache, *keys])])
  return config, run_data.open_data(config, batch, lambda line: None)


def write(folder: Path, words: list[str], name: str = "a") -> None:
  (folder / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": word}) for word in words))


def test_the_next_examples_of_a_checkpoint_are_compared(tmp_path):
  words = [f"{number:015}" for number in random.Random(0).sample(range(10**15), 12_000)]
  write(tmp_path, words)
  config, data = opened(tmp_path)
  with data as opened_data:
    meta = json.loads(json.dumps(opened_data.meta(config, 50)))
    assert opened_data.resume(50, meta) == [
      "Data: example 200 is next. The data and the content of the next examples match the checkpoint."
    ]
    assert opened_data.meta(config, 51)["cursor"]["next_examples"] != meta["cursor"]["next_examples"]
  # Half as many examples per step: other steps, the same next examples.
  _, data = opened(tmp_path, batch=2)
  with data as opened_data:
    other = copy.deepcopy(meta)
    other["identity"] = opened_data.identity
    assert "match the checkpoint" in opened_data.resume(50, other)[0]
  # The middle of the file changes, where its digest does not look.
  content = (tmp_path / "a.jsonl").read_bytes()
  changed = bytearray(content)
  changed[70_000:-70_000] = changed[70_000:-70_000].translate(bytes.maketrans(b"123456789", b"234567891"))
  (tmp_path / "a.jsonl").write_bytes(changed)
  config, data = opened(tmp_path, f"dataset_cache_directory={tmp_path}/other")
  with data as opened_data:
    meta["identity"] = opened_data.identity  # as if none of the first examples had changed
    with pytest.raises(ConfigMismatch, match=r"example 200 .* differ from the checkpoint's \(\w{16} -> \w{16}\)"):
      opened_data.resume(50, meta)
  config, data = opened(tmp_path, f"dataset_cache_directory={tmp_path}/other", "allow_config_change=data")
  with data as opened_data:
    assert "differ from the checkpoint's" in opened_data.resume(50, meta)[0]


def test_examples_that_cannot_be_read_do_not_prevent_a_save(tmp_path):
  write(tmp_path, [f"word {number}" for number in range(40)])
  config, data = opened(tmp_path)
  with data as opened_data:
    opened_data.train._source._records.close()
    for file in (tmp_path / "cache").glob("corpus-*/train.records"):
      file.write_bytes(b"")
    meta = opened_data.meta(config, 2)
    assert meta["cursor"]["next_examples"] == ""
    assert "are not compared" in opened_data.resume(2, meta)[0]


def as_before(meta: dict) -> dict:
  """The meta without the number of the order, as the versions with order 1 wrote it."""
  meta = json.loads(json.dumps(meta))
  assert meta["cursor"].pop("order") == order.FIRST
  return meta


def contents(loader: Loader, steps: range) -> list[list[list[int]]]:
  return [loader.batch(step).tokens.tolist() for step in steps]


@pytest.mark.parametrize("mixture", [False, True])
def test_a_run_keeps_the_order_that_it_started_with(tmp_path, mixture):
  write(tmp_path, [f"word {number}" for number in range(500)])
  keys = [f"grain_eval_files={tmp_path}/a.jsonl"]
  if mixture:
    (tmp_path / "m.yml").write_text(json.dumps({"a": {"weight": 1, "path": f"{tmp_path}/a.jsonl"}}))
    keys += [f"grain_train_mixture_config_path={tmp_path}/m.yml", "grain_train_files="]
  config, data = opened(tmp_path, *keys)
  with data as old:
    new = contents(old.train, range(10)), contents(old.evaluations["eval"], range(10))
    old.train.use_order(order.FIRST)
    old.evaluations["eval"].use_order(order.FIRST)
    old.identity = old.identity | {"data": old.train.fingerprint()}
    expected = contents(old.train, range(10)), contents(old.evaluations["eval"], range(10))
    meta = as_before(old.meta(config, 5))
  seed = int(hashlib.sha256(b"0").hexdigest()[:8], 16)
  shuffled = grain.MapDataset.range(500).shuffle(seed=seed)
  assert [bytes(row).strip(b"\0") for row in np.reshape(expected[0], (40, -1)).astype(np.uint8)] == [
    f"word {shuffled[index]}".encode() for index in range(40)
  ]
  assert new[0] != expected[0] and new[1] != expected[1]
  _, data = opened(tmp_path, *keys)
  with data as resumed:
    assert resumed.accept(config, meta) == []
    lines = resumed.resume(5, meta)
    assert "match the checkpoint" in lines[0] and "keeps order 1" in lines[1]
    assert contents(resumed.train, range(10)) == expected[0]
    assert contents(resumed.evaluations["eval"], range(10)) == expected[1]
    # Its own checkpoints name the order, and the run starts again with the newest order if it has no state.
    assert resumed.meta(config, 5)["cursor"] == meta["cursor"] | {"order": order.FIRST}
    assert resumed.resume(0, None) == []
    assert contents(resumed.train, range(10)) == new[0]
    assert resumed.identity["data"] != meta["identity"]["data"]


# What bfbc953 wrote after step 5 of this mixture, and a hash of the tokens that it read after it.
_CURSOR_OF_ORDER_2 = """{"next_example": 20, "seed": 0, "epoch": 0, "order": 2, "mixture": {"since": 0, "steps": [4, 0],
  "members": {"a": {"id": "a04865e8ca6d62d3", "before": 0, "count": 10},
              "b": {"id": "26f0f9ba6c0db92e", "before": 0, "count": 10}}},
  "sources": {"a04865e8ca6d62d3": 10, "26f0f9ba6c0db92e": 10}, "bad_records": 0,
  "next_examples": "b87b64518c72738f"}"""
_DATA_OF_ORDER_2 = "86e2306e3c070e5a837cb7a307bf5c1595d1900840760fa58b03e10ea5a75daa"
_READ_WITH_ORDER_2 = "7cedaa5f683e81e94a05bbfb8909de2920ccbc6048496cae10e147e682028b58"


def test_a_run_of_the_version_with_order_2_reads_the_same_examples(tmp_path):
  for name, word, size in (("a", "word", 90), ("b", "WORD", 89)):
    write(tmp_path, [f"{word} {number}" for number in range(size)], name)
  sources = {name: {"weight": 1, "path": f"{tmp_path}/{name}.jsonl"} for name in "ab"}
  (tmp_path / "m.yml").write_text(json.dumps(sources))
  keys = [f"grain_train_mixture_config_path={tmp_path}/m.yml", "grain_train_files="]
  _, data = opened(tmp_path, *keys, f"grain_eval_files={tmp_path}/b.jsonl")
  with data as resumed:
    meta = {"cursor": json.loads(_CURSOR_OF_ORDER_2), "identity": {"data": _DATA_OF_ORDER_2, "global_batch_size": 4}}
    lines = resumed.resume(5, meta | {"tokens": 320})
    assert "match the checkpoint" in lines[0] and "keeps order 2" in lines[1]
    read = b"".join(resumed.train.batch(step).tokens.tobytes() for step in range(5, 100))
    assert hashlib.sha256(read).hexdigest() == _READ_WITH_ORDER_2
    assert resumed.identity["data"] == _DATA_OF_ORDER_2 and resumed.train.cursor(5)["order"] == 2


def test_an_order_of_a_newer_version_is_refused(tmp_path):
  write(tmp_path, ["a", "b", "c", "d"])
  config, data = opened(tmp_path)
  with data as opened_data:
    meta = opened_data.meta(config, 1)
    meta["cursor"]["order"] = order.NEWEST + 1
    with pytest.raises(ConfigMismatch, match="order with number 4, and this version knows the orders 1 to 3"):
      opened_data.accept(config, meta)
