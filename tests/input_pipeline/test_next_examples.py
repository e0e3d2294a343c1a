"""A checkpoint has a hash of the next examples, and a resume compares it."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import random
from pathlib import Path

import pytest
from tests.support.command import last_of_each

from trainer.checkpoint.checkpoint_errors import ConfigMismatch
from trainer.config.errors import ConfigError
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


def test_a_run_does_not_resume_on_a_corpus_that_was_changed_in_place(tmp_path):
  write(tmp_path, [f"word{number:05}" for number in range(12_000)])
  file = tmp_path / "a.jsonl"
  config, data = opened(tmp_path)
  with data as opened_data:
    meta = json.loads(json.dumps(opened_data.meta(config, 50)))
    assert opened_data.accept(config, meta) == []
  status = file.stat()
  file.write_bytes(file.read_bytes().replace(b"word06000", b"wood06000"))
  os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
  assert file.stat().st_size == status.st_size
  config, data = opened(tmp_path)
  with data as opened_data, pytest.raises(ConfigMismatch, match="data"):
    opened_data.accept(config, meta)
  config, data = opened(tmp_path, "allow_config_change=data")
  with data as opened_data:
    assert opened_data.accept(config, meta), "the change is in the log"


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


def test_limits_of_epochs_that_end_before_the_run_are_an_error(tmp_path):
  write(tmp_path, [f"word {number}" for number in range(30)])
  source = {"path": f"{tmp_path}/a.jsonl", "grain_file_type": "jsonl", "weight": 1, "epochs": 1}
  (tmp_path / "mixture.yml").write_text(json.dumps({"a": source}))
  mixed = ["grain_train_files=", f"grain_train_mixture_config_path={tmp_path}/mixture.yml"]
  for steps, error in (("steps=15", None), ("steps=20", "steps=20: the sources of the mixture end after step 15")):
    _, data = opened(tmp_path, *mixed, steps, batch=2)
    with data as opened_data, pytest.raises(ConfigError, match=error) if error else contextlib.nullcontext():
      opened_data.resume(0, None)
