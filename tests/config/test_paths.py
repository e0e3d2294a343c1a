"""Output and data folders are checked before anything is created."""

from __future__ import annotations

import os

import pytest

from trainer.config import ConfigError, load, paths


@pytest.fixture(autouse=True)
def empty_working_directory(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)


def failure(*keys: str) -> str:
  with pytest.raises(ConfigError) as caught:
    load(["configs/base.yml", *keys])
  return str(caught.value)


@pytest.mark.parametrize("folder", ["/proc/runs", "/dev/null/runs"])
def test_an_output_folder_that_cannot_be_written_is_refused(folder):
  assert f"base_output_directory={folder}" in failure(f"base_output_directory={folder}")


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write everywhere")
def test_an_output_folder_without_permission_is_refused(tmp_path):
  (tmp_path / "locked").mkdir(mode=0o500)
  assert "is not writable" in failure("base_output_directory=locked/runs")


def test_an_output_folder_that_is_a_file_is_refused(tmp_path):
  (tmp_path / "file").write_text("x")
  assert "is a file, not a folder" in failure("base_output_directory=file")
  assert "is a file, not a folder" in failure("base_output_directory=.", "run_name=file")


@pytest.mark.usefixtures("gcsfs")
def test_a_new_output_folder_is_accepted_and_not_created(tmp_path):
  load(["configs/base.yml", "base_output_directory=a/b/c", "run_name=r"])
  load(["configs/base.yml", "base_output_directory=gs://some-bucket/runs", "run_name=r"])
  assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("address", ["az://x/y", "://x", "gs:/bucket/x", "/tmp/gs://bucket", "GS://bucket/x"])
@pytest.mark.usefixtures("gcsfs")
def test_an_address_that_cannot_be_written_is_refused(address, tmp_path):
  message = failure(f"base_output_directory={address}")
  assert message.startswith(f"base_output_directory={address}: must be gs://BUCKET/FOLDER, or a folder of this machine")
  assert list(tmp_path.iterdir()) == []


def test_gs_needs_its_package(monkeypatch):
  looked_for = []
  monkeypatch.setattr(paths, "is_installed", lambda package: looked_for.append(package))
  assert "needs the package gcsfs, which is not installed" in failure("base_output_directory=gs://bucket/runs")
  assert looked_for == ["gcsfs", "tensorflow"]
  monkeypatch.undo()
  assert paths.is_installed("yaml") and not paths.is_installed("no_such_package")


def test_a_folder_in_the_place_of_a_run_file_is_refused(tmp_path):
  for name in ("log.txt", "metrics.jsonl", "config.yml"):
    (tmp_path / "runs" / name / name).mkdir(parents=True)
    assert f"{name}: is a folder, and the run needs a file" in failure(f"run_name={name}")
  (tmp_path / "runs/c").mkdir()
  (tmp_path / "runs/c/checkpoints").write_text("x")
  assert "checkpoints: is a file, and the run needs a folder" in failure("run_name=c")


KEYS = ["base_output_directory", "dataset_path", "tokenizer_type=bpe tokenizer_path"]


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize(
  ("value", "words"),
  [
    ("~nouser/x", "there is no such user"),
    ("x/" * 2500, "is too long"),
    ("./" + 200 * "\u00e9", "is too long"),
    ("a/b\0c", "has a NUL"),
    ("a/\ud800", "has a character that no file name can have"),
  ],
  ids=["user", "long", "many bytes", "NUL", "surrogate"],
)
def test_a_path_that_no_file_can_have_is_refused(keys, value, words, tmp_path):
  *others, name = keys.split()
  message = failure(*others, f"{name}={value}")
  assert name in message and words in message
  assert len(message) < 400
  assert list(tmp_path.iterdir()) == []


def test_a_config_file_with_an_impossible_name_is_refused(tmp_path):
  for value, words in {"~nouser/x": "no such user", 5000 * "x": "is too long", "a\0b.yml": "has a NUL"}.items():
    with pytest.raises(ConfigError, match=f"^config file .*{words}"):
      load([value])


@pytest.mark.parametrize("key", ["jax_cache_dir", "base_output_directory"])  # its default has ~; the user gives ~
def test_without_a_home_folder_the_message_names_home(monkeypatch, key):
  """As in a container whose user is a number without an entry in /etc/passwd."""
  monkeypatch.delenv("HOME")
  monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
  message = failure("dataset_type=synthetic", "base_output_directory=~/runs")
  assert f"{key}=~/" in message and "~ is the home folder, and this user has none" in message
  assert "Set HOME to a folder" in message and "no such user" not in message


def test_a_tilde_means_the_home_folder(monkeypatch, tmp_path):
  monkeypatch.setenv("HOME", str(tmp_path))
  config = load(["configs/base.yml", "base_output_directory=~/runs/", "run_name=r"])
  assert config.run_directory == f"{tmp_path}/runs/r"
  (tmp_path / "file").write_text("x")
  assert "is a file, not a folder" in failure("base_output_directory=~/file")


@pytest.mark.parametrize(
  "keys",
  [
    ["base_output_directory="],
    ["base_output_directory=gs:///runs"],
    ["base_output_directory=gs://Bucket_A?/runs"],
    ["run_name=../elsewhere"],
    ["run_name=" + 300 * "a"],
    ["run_name=a\tb"],
    ["run_name=a*"],
    ["base_output_directory=runs[1]"],
  ],
)
def test_impossible_names_are_refused(keys):
  assert failure(*keys).startswith(keys[0].partition("=")[0])


def test_a_dataset_path_must_contain_text(tmp_path):
  (tmp_path / "data" / "inner").mkdir(parents=True)
  assert "there is no such file or folder" in failure("dataset_path=gone")
  assert "contains no file of .txt, .md, .py, .jsonl" in failure("dataset_path=data")
  (tmp_path / "data" / "inner" / "a.bin").write_bytes(b"123")
  (tmp_path / "data" / "inner" / "a.txt").write_text("")
  assert "contains no file of .txt" in failure("dataset_path=data")
  (tmp_path / "data" / ".hidden").mkdir()
  (tmp_path / "data" / ".hidden" / "a.txt").write_text("seen by nobody")
  assert "contains no file of .txt" in failure("dataset_path=data")
  assert "is not a text file" in failure("dataset_path=data/inner/a.bin")
  assert "is an empty file" in failure("eval_dataset_path=data/inner/a.txt")
  assert "has no file of .txt" in failure("dataset_path=memory://bucket/data")
  (tmp_path / "data" / "inner" / "a.txt").write_text("hello")
  load(["configs/base.yml", "dataset_path=data", "eval_dataset_path=data/inner/a.txt"])


def test_a_local_checkpoint_folder_must_be_writable(tmp_path):
  keys = ["enable_emergency_checkpoint=true", "local_checkpoint_period=2"]
  assert "local_checkpoint_directory=/proc/x" in failure(*keys, "local_checkpoint_directory=/proc/x")
  load(["configs/base.yml", *keys, "local_checkpoint_directory=ramdisk"])
  assert list(tmp_path.iterdir()) == []
