"""The wheel of the project, unpacked, and commands that run from it instead of from the clone."""

from __future__ import annotations

import fcntl
import os
import pathlib
import subprocess
import sys
import zipfile

ROOT = pathlib.Path(__file__).parents[2]


def build(folder: pathlib.Path) -> pathlib.Path:
  """The wheel's contents in a new folder inside `folder`, and nothing else of the project."""
  (folder / "source").mkdir()
  for name in ("pyproject.toml", "LICENSE", "src"):  # a copy: setuptools writes build/ beside the sources
    (folder / "source" / name).symlink_to(ROOT / name)
  command = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
  built = subprocess.run(command, cwd=folder / "source", capture_output=True, text=True, timeout=200)
  assert built.returncode == 0, built.stderr
  (path,) = folder.glob("*.whl")
  zipfile.ZipFile(path).extractall(folder / "site")
  return folder / "site"


def build_once(shared: pathlib.Path) -> pathlib.Path:
  """The result of `build`, once for all workers of pytest. shared: a folder that every worker sees."""
  folder = shared / "wheel"
  folder.mkdir(exist_ok=True)
  with (folder / "lock").open("w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    if (folder / "complete").exists():
      return folder / "site"
    site = build(folder)
    (folder / "complete").touch()
    return site


def run_in(folder: pathlib.Path, site: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess[str]:
  """Runs `python ARGUMENTS` in `folder`, with the wheel in place of the editable installation."""
  environment = os.environ | {"PYTHONPATH": str(site)}
  return subprocess.run(
    [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=280
  )
