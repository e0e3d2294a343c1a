"""A fork's first day: a copy of the project without the programs around the core, as leave_a_part_out.md makes it.

.venv/bin/python -m tests.support.first_day [OPTION OF PYTEST ...]      runs the tests that such a copy keeps
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

from tests.support.needs import WORKSHOP

ROOT = pathlib.Path(__file__).parents[2]
_NOT_COPIED = (".git", ".venv*", "runs", "build", "dist", "*.egg-info", ".*_cache")
_NO_EXTENSIONS = "def extensions():\n  from trainer.run.plugins import Extensions\n\n  return Extensions()\n"


def make(fork: pathlib.Path) -> dict[str, str]:
  """Makes the copy in the new folder `fork`. Returns the environment in which Python imports it."""
  around = {str(ROOT / "src" / "trainer"), str(ROOT / "tests")}

  def left_out(folder: str, names: list[str]) -> set[str]:
    return shutil.ignore_patterns(*_NOT_COPIED)(folder, names) | set(WORKSHOP if folder in around else ())

  shutil.copytree(ROOT, fork, ignore=left_out, symlinks=True)
  trainer = fork / "src" / "trainer"
  (trainer / "defaults.py").write_text(_NO_EXTENSIONS)
  _replace(trainer / "__init__.py", r"^[^\n]*\btrainer\.weights\b[^\n]*\n", "")
  _replace(trainer / "library.py", r"^  from trainer\.weights[^\n]*\n|^  def evaluate\(.*?(?=^  @)|^def _loss\(.*", "")
  _replace(trainer / "run" / "announce.py", r"^  commands = \[\[.*?^  return \[shlex[^\n]*", "  return []")
  return os.environ | {"PYTHONPATH": f"{fork / 'src'}{os.pathsep}{fork}"}


def _replace(path: pathlib.Path, pattern: str, by: str) -> None:
  text, count = re.subn(pattern, by, path.read_text(), flags=re.MULTILINE | re.DOTALL)
  assert count, f"{path.name} has no {pattern}"
  path.write_text(text)


def main() -> int:
  with tempfile.TemporaryDirectory() as folder:
    fork = pathlib.Path(folder) / "fork"
    return subprocess.run([sys.executable, "-m", "pytest", *sys.argv[1:]], cwd=fork, env=make(fork)).returncode


if __name__ == "__main__":
  sys.exit(main())
