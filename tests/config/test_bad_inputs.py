"""Bad inputs of people who come from other programs, mistype, or have other files than they think.

Each gives exit code 2 and one message without a traceback, which names the value and what to do.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainer import __main__ as command
from trainer import app

YAML = {
  "a.yml": "steps: 5\nnum_slices: 1\nelastic_enabled: false\njax_cache_dir: ''\n",
  "text.yml": "steps 5\n",
  "nested.yml": "training:\n  steps: 5\n",
  "twice.yml": "steps: 5\nsteps: 6\n",
  "open.yml": "run_name: 'first\nsteps: 5\n",
  "other.yml": "max_steps: 5\nper_device_train_batch_size: 2\n",
  "anchor.yml": "steps: *five\n",
}


def files(folder: Path) -> None:
  """Writes the files that the inputs name."""
  for name, text in YAML.items():
    (folder / name).write_text(text)
  (folder / "binary.yml").write_bytes(b"\xff\xfe\x00steps")
  for name in ("empty", "folder.yml"):
    (folder / name).mkdir()
  (folder / "file.txt").write_text("some text\n")
  (folder / "records.jsonl").write_text('{"text": "one"}\nno json\n')
  (folder / "bad.json").write_text("{}")
  (folder / "bad.arrayrecord").write_bytes(b"no records")


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
      ("--steps five", "steps=five", "a whole number"),
      ("steps five", "steps=five", "For example: steps=10"),
      ("--stepz 5", "stepz", "Did you mean steps?"),
      ("stepz=5", "stepz", "Did you mean steps?"),
      ("foo.bar=5", "foo.bar", "--help list every key"),
      ("--print-config=1", "--print-config=1", "Write --print-config alone"),
      ("b.yml", "b.yml: expected key=value", "Usage"),
      ("-- steps=5", "--", "expected key=value"),
      ("steps:5", "steps:5: expected key=value", "Usage"),
      # Names of other programs.
      ("--lr 1e-3", "lr (command line)", "no such key"),
      ("weight_decay=0.1", "weight_decay", "Did you mean adam_weight_decay?"),
      # Values.
      ("steps=-5", "steps=-5", "at least 1"),
      ("learning_rate=nan", "learning_rate=nan", "a finite number"),
      ("enable_tensorboard=yes", "enable_tensorboard=yes", "true or false"),
      ("dtype=float16", "dtype=float16", "Did you mean"),
      ("attention=paged", "attention=paged", "Use attention=flash"),
      ("model_name=qwen3-0.6", "model_name=qwen3-0.6", "Did you mean qwen3-0.6b?"),
      ("model_name=../x.yml", "../x.yml: there is no such model file", "A relative path starts here"),
      ("run_name=..", "run_name='..'", "Use a name such as"),
      ("fault_injection=kill@5", "fault_injection=kill@5", "slice_down"),
      # Paths.
      ("base_output_directory=/dev/null/x", "/dev/null", "base_output_directory"),
      ("dataset_path=empty", "dataset_path=empty", "Give another folder"),
    ]
  ),
  # Config files.
  *(
    ([name], fragments)
    for name, *fragments in [
      ("missing.yml", "missing.yml", "config file"),
      ("folder.yml", "folder.yml", "folder"),
      ("binary.yml", "binary.yml", "UTF-8"),
      ("text.yml", "text.yml", "key: value"),
      ("nested.yml", "training", "Keys are flat"),
      ("twice.yml", "steps", "twice"),
      ("open.yml", "open.yml", "line"),
      ("other.yml", "max_steps", "per_device_train_batch_size", "Did you mean per_device_batch_size?"),
      ("anchor.yml", "anchor.yml", "five"),
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
