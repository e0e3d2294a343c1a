"""Which files of a folder are read: links, upper case, compressed files, and what the log says about the others."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tests.support.data_files import TEXTS, everything, load

from input_pipeline import datasets
from input_pipeline.options import DataOptions
from trainer.config.errors import ConfigError

LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)


def keys_of(kind: str, place: object) -> dict[str, str]:
  if kind == "text":
    return {"dataset_type": "text", "dataset_path": str(place)}
  return {"dataset_type": "grain", "grain_file_type": "jsonl", "grain_train_files": str(place)}


def found(kind: str, place: object) -> tuple[list[str], str]:
  """(names of the files that are read, what is left out)."""
  documents = datasets.find(DataOptions(eval_fraction=0.0, **keys_of(kind, place)))["train"]
  return [piece.name for piece in documents.pieces], documents.left_out


def write(root: Path, *names: str) -> None:
  for name in names:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(LINES)


@pytest.fixture
def odd(tmp_path) -> Path:
  """A folder with every odd entry."""
  root = tmp_path / "data"
  write(root, "a.jsonl", "U.JSONL", "deep/b.jsonl", ".hidden/h.jsonl", "c.csv", "deep/d.csv", "e.jsonl.bz2", "LICENSE")
  write(tmp_path, "outside/inner/o.jsonl", "single.jsonl")
  for name, target in {"loop": ".", "deep/up": "..", "out": "../outside", "in": "../outside/inner"}.items():
    (root / name).symlink_to(target)
  for name, target in {"0.jsonl": "a.jsonl", "s.jsonl": "../single.jsonl", "gone.jsonl": "nowhere"}.items():
    (root / name).symlink_to(target)
  os.link(root / "a.jsonl", root / "z.jsonl")
  return root


@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_one_rule_for_every_kind_of_data(odd, kind):
  names, left = found(kind, odd)
  assert names == ["U.JSONL", "a.jsonl", "deep/b.jsonl", "in/o.jsonl", "s.jsonl"]
  assert sorted(left.split("; ")) == [
    f"*.bz2: 1 ({odd}/e.jsonl.bz2)",
    f"*.csv: 2 ({odd}/c.csv, ...)",
    f"broken links: 1 ({odd}/gone.jsonl)",
    f"files without a suffix: 1 ({odd}/LICENSE)",
    f"links to folders that are read already: 3 ({odd}/loop, ...)",
    f"other names of files that are read: 2 ({odd}/z.jsonl, ...)",
  ]


def test_only_stars_and_question_marks_are_patterns(tmp_path):
  """Brackets are part of many names: run[1], {a}, [2024]."""
  write(tmp_path, "run1/wrong.jsonl", "run[1]/a.jsonl", "run[1]/[b].jsonl", "run[1]/deep[2]/c.jsonl", "{x,y}/d.jsonl")
  for pattern, names in {
    "run[1]/*.jsonl": ["[b].jsonl", "a.jsonl"],
    "run[1]/?.jsonl": ["a.jsonl"],
    "run[1]": ["[b].jsonl", "a.jsonl", "deep[2]/c.jsonl"],
    "run[1]/[b].jsonl": ["[b].jsonl"],
    "run[1]/[*.jsonl": ["[b].jsonl"],
    "run[1]/**/*.jsonl": ["[b].jsonl", "a.jsonl", "deep[2]/c.jsonl"],
    "**/deep[2]/*.jsonl": ["c.jsonl"],
    "*[1]/a.jsonl": ["a.jsonl"],
    "{x,y}/*": ["d.jsonl"],
  }.items():
    assert found("jsonl", f"{tmp_path}/{pattern}")[0] == names, pattern
  assert found("text", f"{tmp_path}/run[1]")[0] == ["[b].jsonl", "a.jsonl", "deep[2]/c.jsonl"]
  with pytest.raises(ConfigError, match=r"has no files .*\n.*, in which brackets stand for themselves, or set"):
    found("jsonl", f"{tmp_path}/run[0-9]/*.jsonl")


def test_a_folder_without_such_files_says_what_it_has(tmp_path):
  write(tmp_path, "d/a.parquet", "d/b.parquet")
  with pytest.raises(ConfigError, match=r"no files with grain_file_type=jsonl \(not read: \*.parquet: 2 \("):
    found("jsonl", tmp_path / "d")
  with pytest.raises(ConfigError, match=r"has no text \(not read: \*.parquet: 2"):
    found("text", tmp_path / "d")
  with pytest.raises(
    ConfigError, match=r"a.parquet is a file of another type than .*=jsonl.\nSet grain_file_type=parquet"
  ):
    found("jsonl", tmp_path / "d" / "a.parquet")


def test_a_byte_order_mark_is_not_text(tmp_path):
  text = "\n".join(TEXTS)
  for name, content in {"one": text.encode(), "two": text.encode("utf-8-sig")}.items():
    (tmp_path / name).mkdir()
    (tmp_path / name / "a.txt").write_bytes(content)
  # eval_fraction=0, because the bytes of the mark count in the split.
  one, two = (load(tmp_path / name, eval_fraction=0.0, **keys_of("text", tmp_path / name)) for name in ("one", "two"))
  assert everything(one) == everything(two)
