""".ci/run with stand-ins for Python and setup.sh: its exit code, its last lines, and that no process outlives it."""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason=".ci/run finds its processes in /proc")
ROOT = pathlib.Path(__file__).parents[1]
# Stands for every program of both environments. The marker file `pytest` decides: pass, fail, hang or leave a process.
PROGRAM = """#!/usr/bin/env bash
case "$*" in
  "-m pytest"*) ;;
  *) exit 0 ;;
esac
case "$(cat behavior)" in
  fail) echo "1 failed, 2 passed in 0.1s"; exit 1 ;;
  hang) trap 'echo cleaned up >cleaned' TERM; touch hanging; setsid sleep 1000 & wait; exit 1 ;;
  leave) setsid sleep 1000 >/dev/null 2>&1 & ;;
  dirty) touch left_behind ;;
esac
echo "3 passed in 0.1s"
"""


@pytest.fixture
def clone(tmp_path):
  """A git repository with .ci/run, whose environments are stand-ins."""
  (tmp_path / ".ci").mkdir()
  shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
  (tmp_path / "setup.sh").write_text("exit 0\n")
  (tmp_path / "tests").mkdir()
  (tmp_path / "tests" / "test_torch.py").write_text("pytestmark = pytest.mark.oldest\n")
  (tmp_path / ".gitignore").write_text(".venv*/\nbehavior\nhanging\ncleaned\n")
  for environment in (".venv", ".venv-oldest"):
    folder = tmp_path / environment / "bin"
    folder.mkdir(parents=True)
    for name in ("python", "python3", "ruff", "mypy"):
      (folder / name).write_text(PROGRAM)
      (folder / name).chmod(0o755)
  for command in (["init", "-q"], ["add", "."], ["-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "m"]):
    subprocess.run(["git", *command], cwd=tmp_path, check=True, timeout=60)
  return tmp_path


def start(clone: pathlib.Path, behavior: str) -> subprocess.Popen:
  (clone / "behavior").write_text(behavior)
  return subprocess.Popen(
    ["bash", ".ci/run"],
    cwd=clone,
    env=os.environ | {"PATH": f"{clone}/.venv/bin:{os.environ['PATH']}"},  # its python3 downloads no uv
    stdin=subprocess.DEVNULL,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


def left_in(clone: pathlib.Path) -> list[str]:
  """The running processes whose working directory is the clone."""
  found = []
  for process in pathlib.Path("/proc").glob("[0-9]*"):
    try:
      if (process / "cwd").readlink() == clone and (process / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
        found.append((process / "cmdline").read_text())
    except OSError:
      continue
  return found


@pytest.mark.parametrize(
  ("behavior", "code", "said"),
  [
    ("pass", 0, "all green"),
    ("fail", 1, "error: tests"),
    ("leave", 1, "error: processes are left"),
    ("dirty", 1, "error: the checks changed files"),
  ],
)
def test_exit_code_and_last_lines(clone, behavior, code, said):
  process = start(clone, behavior)
  printed, _ = process.communicate(timeout=240)
  assert process.returncode == code, printed
  last = "\n".join(printed.splitlines()[-8:])
  assert said in last
  closing = "1 failed, 2 passed in 0.1s" if behavior == "fail" else "3 passed in 0.1s"
  assert last.count(closing) == 3
  assert left_in(clone) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_tests_too(clone, number):
  process = start(clone, "hang")
  deadline = time.monotonic() + 200
  while not (clone / "hanging").exists():
    assert time.monotonic() < deadline
    time.sleep(0.05)
  os.kill(process.pid, number)
  process.communicate(timeout=240)
  assert process.returncode == 128 + number
  assert (clone / "cleaned").exists(), "the tests were killed before they could end their own processes"
  assert left_in(clone) == []
