"""Bad inputs of people who come from other programs, mistype, or have other files than they think.

Each gives exit code 2 and one message without a traceback, which names the value and what to do.
"""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from trainer import __main__ as command
from trainer import app

YAML = {
  "a.yml": "steps: 5\nnum_slices: 1\nelastic_enabled: false\njax_cache_dir: ''\n",
  "list.yml": "- steps: 5\n",
  "text.yml": "steps 5\n",
  "nested.yml": "training:\n  steps: 5\n",
  "tab.yml": "steps: 5\n\tlog_period: 2\n",
  "twice.yml": "steps: 5\nsteps: 6\n",
  "both.yml": "log_period: 5\nlog-period: 6\n",
  "many.yml": "steps: [5, 6]\n",
  "python.yml": "steps: !!python/object/apply:os.system ['true']\n",
  "open.yml": "run_name: 'first\nsteps: 5\n",
  "equals.yml": "steps=5\nrun_name=x\n",
  "other.yml": "max_steps: 5\nper_device_train_batch_size: 2\n",
  "cycle.yml": "base_config: cycle.yml\n",
  "orphan.yml": "base_config: nowhere.yml\n",
  "anchor.yml": "steps: *five\n",
  "word.yml": "steps: five\n",
  "bool.yml": "enable_report: maybe\n",
  "date.yml": "steps: 2026-01-01\n",
  "colon.yml": "dataset_path: a: b\n",
  "json.json": '{"steps": 5',
}


def files(folder: Path) -> None:
  """Writes the files that the inputs name."""
  for name, text in YAML.items():
    (folder / name).write_text(text)
  (folder / "binary.yml").write_bytes(b"\xff\xfe\x00steps")
  for name in ("empty", "folder.yml", "models", "unread"):
    (folder / name).mkdir()
  (folder / "file.txt").write_text("some text\n")
  (folder / "records.jsonl").write_text('{"text": "one"}\nno json\n')
  (folder / "column.jsonl").write_text(json.dumps({"content": "a text"}) + "\n")
  (folder / "empty.jsonl").write_text("")
  (folder / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "one"}\n' * 99)[:40])
  (folder / "bad.json").write_text("{}")
  (folder / "bad.arrayrecord").write_bytes(b"no records")
  (folder / "bad.parquet").write_bytes(b"PAR1 but no footer")


def text(path: str, *more: str) -> list[str]:
  return ["a.yml", "dataset_type=text", f"dataset_path={path}", *more]


def grain(path: str, *more: str) -> list[str]:
  return ["a.yml", "dataset_type=grain", f"grain_train_files={path}", *more]


def one(arguments: str) -> list[str]:
  return ["a.yml", *arguments.split()]


# (arguments, fragments of the message: the value and the remedy)
CASES: list[tuple[list[str], list[str]]] = [
  # Words of the command line.
  *(
    (one(arguments), fragments)
    for arguments, *fragments in [
      ("steps", "steps: the key steps needs a value", "Write steps=VALUE"),
      ("--steps", "--steps: the key steps needs a value", "Write steps=VALUE"),
      ("--steps --log-period 2", "--steps: the key steps needs a value"),
      ("--steps five", "steps=five", "a whole number"),
      ("steps = five", "steps=five", "a whole number"),
      ("steps =five", "steps=five", "a whole number"),
      ("steps five", "steps=five", "For example: steps=10"),
      ("steps= 5", "steps=", "5: expected key=value"),
      ("--stepz 5", "stepz", "Did you mean steps?"),
      ("stepz 5", "stepz: expected key=value", "Usage"),
      ("stepz=5", "stepz", "Did you mean steps?"),
      ("model.steps=5", "model.steps", "Did you mean steps?"),
      ("trainer.steps=5", "trainer.steps", "Did you mean steps?"),
      ("foo.bar=5", "foo.bar", "--help list every key"),
      ("-v", "v (command line)", "no such key"),
      ("--dry-run", "dry-run", "no such key"),
      ("-x", "x (command line)", "no such key"),
      ("--print-config=1", "--print-config=1", "Write --print-config alone"),
      ("b.yml", "b.yml: expected key=value", "Usage"),
      ("--config c.yml", "config", "no such key"),
      ("-- steps=5", "--", "expected key=value"),
      ("steps==5", "steps==5", "a whole number"),
      ("steps:5", "steps:5: expected key=value", "Usage"),
      ("=5", "=5: expected key=value", "Usage"),
      ("base_config=list.yml", "base_config", "Write it in a.yml"),
      # Names of other programs.
      ("lr=1e-3", "lr (command line)", "no such key"),
      ("--lr 1e-3", "lr (command line)", "no such key"),
      ("optimizer.lr=1e-3", "optimizer.lr", "no such key"),
      ("training.steps=8", "training.steps", "Did you mean steps?"),
      ("--bf16", "bf16", "no such key"),
      ("weight_decay=0.1", "weight_decay", "Did you mean adam_weight_decay?"),
      ("warmup_steps=10", "warmup_steps", "no such key"),
      ("--nproc_per_node 8", "nproc_per_node", "no such key"),
      # Values.
      ("steps=0", "steps=0", "at least 1"),
      ("steps=-5", "steps=-5", "at least 1"),
      ("steps=1e3.5", "steps=1e3.5", "a whole number"),
      ("steps=1_000x", "steps=1_000x", "a whole number"),
      ("steps=1.5", "steps=1.5", "a whole number"),
      ("steps=inf", "steps=inf", "a whole number"),
      ("learning_rate=nan", "learning_rate=nan", "a finite number"),
      ("learning_rate=3,5", "learning_rate=3,5", "a finite number"),
      ("learning_rate=-1", "learning_rate=-1", "learning_rate must be"),
      ("eval_fraction=1.5", "eval_fraction=1.5", "eval_fraction must be"),
      ("enable_tensorboard=yes", "enable_tensorboard=yes", "true or false"),
      ("enable_report=1", "enable_report=1", "true or false"),
      ("dtype=fp32", "dtype=fp32", "Choices"),
      ("dtype=float16", "dtype=float16", "Did you mean"),
      ("attention=paged", "attention=paged", "Use attention=flash"),
      ("opt_type=rmsprop", "opt_type=rmsprop", "Choices"),
      ("lr_schedule_type=linear", "lr_schedule_type=linear", "Choices"),
      ("remat_policy=some", "remat_policy=some", "Choices"),
      ("model_name=gpt2", "model_name=gpt2", "Models: "),
      ("model_name=qwen3-0.6", "model_name=qwen3-0.6", "Did you mean qwen3-0.6b?"),
      ("model_name=../x.yml", "../x.yml: there is no such model file", "A relative path starts here"),
      ("vocab_size=0", "vocab_size=0", "at least"),
      ("run_name=..", "run_name='..'", "Use a name such as"),
      ("steps=99999999999999999999", "steps=99999999999999999999", "at most"),
      ("num_slices=2 cluster=kubernetes", "cluster=kubernetes", "Choices"),
      ("fault_injection=kill@5", "fault_injection=kill@5", "slice_down"),
      ("compile_xla_flags=xla", "compile_xla_flags", "xla"),
      ("head_dim=7", "head_dim=7", "even"),
      ("base_num_query_heads=3 base_num_kv_heads=2", "base_num_query_heads=3", "base_num_kv_heads"),
      # Paths.
      ("base_output_directory=/dev/null/x", "/dev/null", "base_output_directory"),
      ("base_output_directory=s3://bucket/x", "s3://bucket/x", "gs://"),
      ("base_output_directory=file.txt", "file.txt", "base_output_directory"),
      ("dataset_path=nowhere dataset_type=text", "nowhere", "dataset_path"),
      ("dataset_path=empty", "dataset_path=empty", "Give another folder"),
    ]
  ),
  # Config files.
  *(
    ([name], fragments)
    for name, *fragments in [
      ("missing.yml", "missing.yml", "config file"),
      ("a.yaml", "a.yaml", "config file"),
      ("folder.yml", "folder.yml", "folder"),
      ("binary.yml", "binary.yml", "UTF-8"),
      ("list.yml", "list.yml", "key: value"),
      ("text.yml", "text.yml", "key: value"),
      ("equals.yml", "equals.yml", "key: value"),
      ("nested.yml", "training", "Keys are flat"),
      ("tab.yml", "tab.yml", "line 2"),
      ("twice.yml", "steps", "twice"),
      ("both.yml", "log_period is given twice", "Remove one"),
      ("many.yml", "steps holds a list", "one value"),
      ("open.yml", "open.yml", "line"),
      ("other.yml", "max_steps", "per_device_train_batch_size", "Did you mean per_device_batch_size?"),
      ("cycle.yml", "cycle.yml", "Remove a base_config line"),
      ("orphan.yml", "nowhere.yml: there is no such base_config", "YAML files there: a.yml"),
      ("anchor.yml", "anchor.yml", "five"),
      ("word.yml", "word.yml", "steps=five", "a whole number"),
      ("bool.yml", "enable_report=maybe", "true or false"),
      ("date.yml", "steps=2026-01-01", "a whole number"),
      ("colon.yml", "colon.yml", "line 1"),
      ("steps=5", "steps=5", "must be a config file"),
      ("--steps", "--steps", "must be a config file"),
      ("json.json", "json.json"),
    ]
  ),
  # Datasets and tokenizers.
  (text("empty"), ["dataset_path=empty", "Give another folder"]),
  (text("file.txt", "tokenizer_type=bpe", "tokenizer_path=nowhere.json"), ["nowhere.json", "tokenizer_path"]),
  (
    text("file.txt", "tokenizer_type=bpe", "tokenizer_path=bad.json"),
    ["tokenizer_path=bad.json", "Give a tokenizer.json"],
  ),
  (text("file.txt", "tokenizer_path=bad.json"), ["tokenizer_path", "tokenizer_type"]),
  (text("file.txt", "vocab_size=100", "tokenizer_type=byte"), ["vocab_size=100", "at least"]),
  (grain("nowhere*.parquet"), ["nowhere*.parquet", "grain_train_files"]),
  (grain("file.txt"), ["file.txt", "grain_file_type"]),
  (grain("records.jsonl", "grain_file_type=parquet"), ["records.jsonl", "grain_file_type"]),
  (grain("bad.arrayrecord", "grain_file_type=arrayrecord"), ["bad.arrayrecord", "ArrayRecord"]),
  (["a.yml", "dataset_type=tfds", "dataset_path=empty"], ["empty", "tfds"]),
  (["a.yml", "dataset_type=hf", "dataset_path=empty"], ["dataset_path=empty", "save_to_disk"]),
]


@pytest.fixture
def inputs(tmp_path, monkeypatch):
  files(tmp_path)
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("HOME", str(tmp_path))
  monkeypatch.setattr(app, "_train", lambda *_: 0)  # for an input that is accepted by mistake


@pytest.mark.parametrize(("arguments", "fragments"), CASES, ids=[" ".join(case[0]) for case in CASES])
def test_a_bad_input_is_answered_with_the_value_and_the_remedy(inputs, capsys, arguments, fragments):
  before = sorted(os.listdir())
  assert command.main(arguments) == 2
  printed = capsys.readouterr()
  assert printed.out == "" and printed.err.startswith("error: ") and "Traceback" not in printed.err
  assert [fragment for fragment in fragments if fragment not in printed.err] == [], printed.err
  assert len(printed.err.splitlines()) <= 8 and sorted(os.listdir()) == before


def test_there_are_a_hundred():
  assert len({" ".join(arguments) for arguments, _ in CASES}) >= 100
