"""trainer.tools.tokenize reads what a run reads: addresses, odd folders, conversations, bad records."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path

from tests.input_pipeline import test_folders, test_remote
from tests.input_pipeline.test_bad_records import BAD, jsonl
from tests.input_pipeline.test_conversations import load, options, sequences_of
from tests.support import chats
from tests.support.data_files import TEXTS, written
from tests.tools.test_tokenize import job_of

from input_pipeline import datasets
from input_pipeline.options import DataOptions
from input_pipeline.tokenizer import ByteTokenizer
from trainer.tools.tokenize import part
from trainer.tools.tokenize.__main__ import main

odd, store = test_folders.odd, test_remote.store  # fixtures


def test_the_tokenizer_tool_reads_an_address(tmp_path, store):
  """A part of a file, in the process that got it by pickling."""
  keys = written(tmp_path, "text", "jsonl")
  test_remote.put(store, Path(keys["grain_train_files"]), "corpus")
  digests = set()
  for number, address in enumerate((keys["grain_train_files"], "memory://bucket/corpus")):
    cfg = DataOptions(dataset_type="grain", **keys | {"grain_train_files": address})
    splits = datasets.find(cfg)
    job = pickle.loads(pickle.dumps(part.TokenizeJob(splits, ByteTokenizer(), 258, 8, "split", "documents", 0)))
    (_, second, *_) = splits["train"].cut(splits["train"].pieces[0], 200)
    digests.add(part.write(job, "train", [second], tmp_path / f"{number}.array_record", lambda tokens: None)["sha256"])
  assert len(digests) == 1


def test_the_tokenizer_command_names_what_is_not_read(tmp_path, odd, capsys):
  keys = ["configs/base.yml", "dataset_type=text", f"dataset_path={odd}", "vocab_size=300", "eval_fraction=0"]
  keys += [f"base_output_directory={tmp_path}", f"dataset_cache_directory={tmp_path}/cache", "--processes=1"]
  assert main([*keys, "--output", str(tmp_path / "tokens")]) == 0
  assert f"Not read in {odd}: " in capsys.readouterr().out


def test_records_of_documents_have_no_masks(tmp_path, capsys):
  """Refused if the first document has a mask, and if a part has one and the first document of all parts has none."""
  keys = ["configs/base.yml", "dataset_type=grain", "grain_file_type=jsonl", "vocab_size=300"]
  keys += [f"dataset_cache_directory={tmp_path}/cache", "--processes=1", f"--output={tmp_path}/out"]
  for first, message in (([1, 0], "or of a document with a mask, are trained"), (None, "A document has a mask, and")):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": [1, 2], "mask": first}) + "\n")
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": [1, 2], "mask": [1, 0]}) + "\n")
    assert main([*keys, f"grain_train_files={tmp_path}/*.jsonl", "--part-megabytes=0.00001"]) == 2
    assert message in capsys.readouterr().err.replace("\n", " ")


def test_tokenize_writes_windows_with_weights_and_prints_a_preview(tmp_path, capsys):
  path = chats.write_jsonl(tmp_path / "a.jsonl", chats.conversations(30))
  cfg = options(tmp_path, grain_train_files=path)
  keys = (
    ["configs/base.yml"]
    + [f"{key}={value}" for key, value in cfg.model_dump(exclude_unset=True).items()]
    + ["vocab_size=400"]
  )
  assert main([*keys, "--output", str(tmp_path / "out"), "--processes", "1"]) == 2
  assert "--records=documents: a record of token ids does not say" in capsys.readouterr().err
  assert main([*keys, "--output", str(tmp_path / "out"), "--processes", "1", "--records", "windows"]) == 0
  written = load(
    options(tmp_path, grain_file_type="arrayrecord_windows", grain_train_files=str(tmp_path / "out/train"))
  )
  assert sequences_of(written) == sequences_of(load(cfg))
  capsys.readouterr()
  assert main([*keys, "--preview", "2"]) == 0
  said = capsys.readouterr().out
  assert said.count("---\n") == 3 and "<|im_start|>assistant\n[[" in said
  assert re.search(r"--- read: 30 conversations, [\d,]+ tokens, [\d.]+% trained", said)


def test_the_tool_skips_the_same_records_and_names_them_in_the_manifest(tmp_path):
  job = job_of("documents", **jsonl(tmp_path), train_data_columns="body", max_bad_records=1)
  assert job.max_bad_records == 1
  pieces = job.splits["train"].pieces
  counts = part.write(job, "train", pieces, tmp_path / "a.array_record", lambda tokens: None)
  assert (counts["documents"], counts["bad_records"]) == (len(TEXTS) - 1, 1)
  assert re.search(rf"data.jsonl:{BAD + 1}: its body is a int", counts["bad"][0])
