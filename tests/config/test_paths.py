"""Output and data folders are judged before anything is created."""

from __future__ import annotations

import os

import pytest

from trainer.config import ConfigError, load
from trainer.data import corpus


@pytest.fixture(autouse=True)
def empty_working_directory(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)


def failure(*keys: str) -> str:
  with pytest.raises(ConfigError) as caught:
    load(["configs/base.yml", *keys])
  return str(caught.value)


@pytest.mark.parametrize("folder", ["/proc/runs", "/proc/1/runs", "/dev/null/runs"])
def test_an_output_folder_that_cannot_be_written(folder):
  assert f"base_output_directory={folder}" in failure(f"base_output_directory={folder}")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_output_folder_without_permission(tmp_path):
  (tmp_path / "locked").mkdir(mode=0o500)
  assert "cannot be written to" in failure("base_output_directory=locked/runs")


def test_an_output_folder_that_is_a_file(tmp_path):
  (tmp_path / "file").write_text("x")
  assert "is a file, not a folder" in failure("base_output_directory=file")
  assert "is a file, not a folder" in failure("base_output_directory=.", "run_name=file")


def test_a_new_output_folder_is_fine_and_is_not_created(tmp_path):
  load(["configs/base.yml", "base_output_directory=a/b/c", "run_name=r"])
  load(["configs/base.yml", "base_output_directory=gs://some-bucket/runs", "run_name=r"])
  assert list(tmp_path.iterdir()) == []


def test_the_home_folder_is_meant_by_a_tilde(monkeypatch, tmp_path):
  monkeypatch.setenv("HOME", str(tmp_path))
  config = load(["configs/base.yml", "base_output_directory=~/runs/", "run_name=r"])
  assert config.run_directory == f"{tmp_path}/runs/r"
  (tmp_path / "file").write_text("x")
  assert "is a file, not a folder" in failure("base_output_directory=~/file")


@pytest.mark.parametrize(
  "keys",
  [
    ["base_output_directory="],
    ["base_output_directory=gs://<BUCKET>"],
    ["base_output_directory=gs:///runs"],
    ["base_output_directory=gs://Bucket_A?/runs"],
    ["base_output_directory=${OUTPUT_PATH?}"],
    ["run_name=../elsewhere"],
    ["run_name=/absolute"],
    ["run_name=."],
    ["run_name=" + 300 * "a"],
    ["run_name=a\tb"],
    ["run_name=pathways-<USER>"],
    ["run_name=lr[3e-4]"],
    ["run_name=a*"],
    ["base_output_directory=runs[1]"],
  ],
)
def test_names_that_cannot_be_meant(keys):
  assert failure(*keys).startswith(keys[0].partition("=")[0])


def test_a_dataset_path_must_hold_text(tmp_path):
  (tmp_path / "data" / "inner").mkdir(parents=True)
  assert "there is no such file or folder" in failure("dataset_path=gone")
  assert "holds no file of .txt, .md, .py, .jsonl" in failure("dataset_path=data")
  (tmp_path / "data" / "inner" / "a.bin").write_bytes(b"123")
  (tmp_path / "data" / "inner" / "a.txt").write_text("")
  assert "holds no file of .txt" in failure("dataset_path=data")
  (tmp_path / "data" / ".hidden").mkdir()
  (tmp_path / "data" / ".hidden" / "a.txt").write_text("seen by nobody")
  assert "holds no file of .txt" in failure("dataset_path=data")
  assert "is not a text file" in failure("dataset_path=data/inner/a.bin")
  assert "is an empty file" in failure("eval_dataset_path=data/inner/a.txt")
  assert "reads local files only" in failure("dataset_path=gs://bucket/data")
  (tmp_path / "data" / "inner" / "a.txt").write_text("hello")
  load(["configs/base.yml", "dataset_path=data", "eval_dataset_path=data/inner/a.txt"])


def test_a_dataset_path_is_judged_as_the_corpus_reads_it(tmp_path):
  (tmp_path / "data").mkdir()
  (tmp_path / "data" / "gone.txt").symlink_to("nowhere")
  for name in ("a", "b"):
    (tmp_path / "data" / name).symlink_to(".")
  os.mkfifo(tmp_path / "data" / "pipe.txt")
  assert "holds no file of .txt" in failure("dataset_path=data")
  assert "is not a text file" in failure("dataset_path=data/pipe.txt")
  (tmp_path / "elsewhere").mkdir()
  (tmp_path / "elsewhere" / "a.txt").write_text("hello")
  (tmp_path / "data" / "link").symlink_to("../elsewhere")
  config = load(["configs/base.yml", "dataset_path=data"])
  assert [piece.name for piece in corpus.find("dataset_path", config.data.dataset_path)] == ["link/a.txt"]


def test_a_dataset_path_is_not_looked_at_when_it_is_not_read():
  load(["configs/base.yml", "dataset_path=gone", "dataset_type=synthetic"])
  assert load(["configs/base.yml"], check_paths=False) == load(["configs/base.yml"])


def test_a_tokenizer_file_must_exist(tmp_path):
  keys = ["tokenizer_type=bpe", "tokenizer_path=t.json"]
  assert "there is no such file" in failure(*keys)
  (tmp_path / "t.json").write_text("{}")
  load(["configs/base.yml", *keys])


def test_a_local_checkpoint_folder_must_be_writable(tmp_path):
  keys = ["enable_emergency_checkpoint=true", "local_checkpoint_period=2"]
  assert "local_checkpoint_directory=/proc/x" in failure(*keys, "local_checkpoint_directory=/proc/x")
  load(["configs/base.yml", *keys, "local_checkpoint_directory=ramdisk"])
  assert list(tmp_path.iterdir()) == []
