"""Cache entries: made once and atomically, also when processes race or are killed."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import time

import pytest

from input_pipeline import cache
from trainer.config.errors import ConfigError


def made(root, build=None, fault=lambda folder: None, log=print):
  build = build or (lambda folder: (folder / "value").write_text("made"))
  return cache.entry(str(root), "thing", build=build, fault=fault, log=log)


def visible(root) -> list[str]:
  return sorted(name for name in os.listdir(root) if not name.endswith(".lock"))


def test_is_built_once(tmp_path):
  builds = []

  def build(folder):
    builds.append(folder)
    (folder / "value").write_text("made")

  root = tmp_path / "new" / "cache"
  assert made(root, build) == made(root, build) == root / "thing"
  assert len(builds) == 1 and (root / "thing" / "value").read_text() == "made"
  assert visible(root) == ["thing"]


def test_a_failed_build_leaves_nothing(tmp_path):
  def build(folder):
    (folder / "value").write_text("half")
    raise RuntimeError("stop")

  with pytest.raises(RuntimeError, match="stop"):
    made(tmp_path, build)
  assert os.listdir(tmp_path) == []
  with pytest.raises(RuntimeError, match="stop"):
    made(tmp_path / "new" / "cache", build)
  assert os.listdir(tmp_path) == []
  assert (made(tmp_path) / "value").read_text() == "made"


def test_a_damaged_entry_is_made_again(tmp_path):
  def fault(folder):
    return None if (folder / "value").read_text() == "made" else "the value is wrong"

  (made(tmp_path) / "value").write_text("spoilt")
  lines = []
  assert (made(tmp_path, fault=fault, log=lines.append) / "value").read_text() == "made"
  assert len(lines) == 1 and "damaged (the value is wrong). Making it again." in lines[0]
  assert visible(tmp_path) == ["thing"]


def test_without_locks_an_entry_is_made_and_the_work_of_others_stays(tmp_path, monkeypatch):
  def flock(*_):
    raise OSError(errno.ENOLCK, "No locks available")

  monkeypatch.setattr(fcntl, "flock", flock)
  others = [tmp_path / f".{name}.{cache._place(tmp_path)}-abcdefgh" for name in ("thing", "other")]
  for folder in others:
    folder.mkdir()
  lines = []

  def build(folder):
    (folder / "value").write_text("made")
    monkeypatch.undo()
    made(tmp_path)  # another process, which is faster

  assert (made(tmp_path, build, log=lines.append) / "value").read_text() == "made"
  assert f"The file system of {tmp_path} has no locks (flock)" in lines[0]
  assert "has 2 unfinished preparations" in lines[1] and len(lines) == 2
  assert visible(tmp_path)[-1] == "thing"


def test_an_unusable_directory_is_refused(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(ConfigError, match=r"=.*file.* cannot be written: .*\. Give another folder"):
    made(tmp_path / "file")
  with pytest.raises(ConfigError, match="dataset_cache_directory=gs://bucket is not a local path"):
    cache.entry("gs://bucket", "thing", build=lambda folder: None, fault=lambda folder: None, log=print)


CHILD = """
import os, pathlib, sys, time
from input_pipeline import cache
root, pause, name = sys.argv[1], float(sys.argv[2]), (*sys.argv[3:], "thing")[0]
def build(folder):
  print("building", flush=True)
  (folder / "value").write_text("half")
  time.sleep(pause) if pause >= 0 else sys.stdin.readline()
  (folder / "value").write_text(f"made by {os.getpid()}")
folder = cache.entry(root, name, build=build, fault=lambda folder: None, log=print)
print((folder / "value").read_text(), flush=True)
"""


def test_racing_processes_build_once(tmp_path, python):
  children = [python(CHILD, str(tmp_path), "0.3") for _ in range(4)]
  outputs = [process.communicate(timeout=60)[0].splitlines() for process in children]
  assert [process.returncode for process in children] == [0] * 4
  assert sum(lines.count("building") for lines in outputs) == 1
  assert len({lines[-1] for lines in outputs}) == 1 and outputs[0][-1].startswith("made by")
  assert visible(tmp_path) == ["thing"]


def test_after_a_failed_build_one_waiting_process_builds(tmp_path, python):
  """Lock file and folder are deleted while they wait: locks on the deleted file must not let two build at once."""
  tmp_path = tmp_path / "new" / "cache"
  failing = CHILD.replace('(folder / "value").write_text(f"made', 'raise RuntimeError("stop")\n  (folder / f"made')
  first = python(failing, str(tmp_path), "0.5")
  assert first.stdout.readline() == "building\n"
  others = [python(CHILD, str(tmp_path), "0.3") for _ in range(3)]
  outputs = [process.communicate(timeout=60)[0].splitlines() for process in others]
  assert first.wait(60) == 1
  assert sum(lines.count("building") for lines in outputs) == 1
  assert len({lines[-1] for lines in outputs}) == 1 and os.listdir(tmp_path) == ["thing"]


def test_a_killed_builder_does_not_block_others(tmp_path, python):
  first = python(CHILD, str(tmp_path), "60")
  assert first.stdout.readline() == "building\n"
  second = python(CHILD, str(tmp_path), "0")
  time.sleep(0.3)
  assert second.poll() is None  # it waits for the first one
  first.send_signal(signal.SIGKILL)
  first.communicate(timeout=60)
  assert second.communicate(timeout=60)[0].splitlines()[1:] == ["building", f"made by {second.pid}"]


@pytest.mark.parametrize("name", ["thing", "another"])
def test_the_next_preparation_deletes_what_killed_ones_left_and_nothing_else(tmp_path, python, name):
  killed, living = python(CHILD, str(tmp_path), "60"), python(CHILD, str(tmp_path), "-1", "living-0123abcd")
  for process in (killed, living):
    assert process.stdout.readline() == "building\n"
  killed.send_signal(signal.SIGKILL)
  killed.communicate(timeout=60)
  (used,) = tmp_path.glob(".living*-*/")
  (left,) = tmp_path.glob(".thing*-*/")
  # Another host, whose locks are invisible here, or an earlier version may still use these.
  others = [tmp_path / left.name.replace(cache._place(tmp_path), "0123abcd"), tmp_path / ".thing-abcdefgh"]
  for folder in others:
    (folder / "whole").mkdir(parents=True)
  lines = python(CHILD, str(tmp_path), "0", name).communicate(timeout=60)[0].splitlines()
  assert not left.exists() and used.exists() and all(folder.exists() for folder in others)
  assert any(f"{left} of a preparation that was killed" in line for line in lines), lines
  assert any(all(str(folder) in line for folder in others) for line in lines), lines
  assert living.communicate("\n", timeout=60)[0].splitlines()[-1] == f"made by {living.pid}"
  assert visible(tmp_path) == sorted([*(folder.name for folder in others), name, "living-0123abcd"])
