"""The wheel of the project, unpacked, and commands that run from it instead of from the clone."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import zipfile

ROOT = pathlib.Path(__file__).parents[2]


def build(folder: pathlib.Path) -> None:
  """Makes `folder`/site with the wheel's contents, and nothing else of the project."""
  (folder / "source").mkdir()
  for name in ("pyproject.toml", "LICENSE", "src"):  # a copy: setuptools writes build/ beside the sources
    (folder / "source" / name).symlink_to(ROOT / name)
  command = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
  built = subprocess.run(command, cwd=folder / "source", capture_output=True, text=True, timeout=200)
  assert built.returncode == 0, built.stderr
  (path,) = folder.glob("*.whl")
  zipfile.ZipFile(path).extractall(folder / "site")


def run_in(folder: pathlib.Path, site: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess[str]:
  """Runs `python ARGUMENTS` in `folder`, with the wheel in place of the editable installation."""
  environment = os.environ | {"PYTHONPATH": str(site)}
  return subprocess.run(
    [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=280
  )
