from __future__ import annotations

import re
import subprocess

import jax

import trainer
from trainer.observe import environment


def git(directory, *arguments: str) -> str:
  identity = ("-c", "user.name=t", "-c", "user.email=t@t")
  command = ["git", "-C", str(directory), *identity, *arguments]
  return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def test_the_commit_is_the_checkouts_and_says_whether_files_changed(tmp_path):
  git(tmp_path, "init", "-q")
  code = tmp_path / "package" / "code.py"
  code.parent.mkdir()
  code.write_text("x = 1\n")
  assert environment.git_commit(code) is None  # not tracked
  git(tmp_path, "add", ".")
  git(tmp_path, "commit", "-qm", "first")
  git(tmp_path, "tag", "-am", "v1", "v1")
  commit = git(tmp_path, "rev-parse", "HEAD")
  assert re.fullmatch("[0-9a-f]{40}", commit) and environment.git_commit(code) == commit
  code.write_text("x = 2\n")
  assert environment.git_commit(code) == f"{commit}-dirty"
  installed = tmp_path / "site-packages" / "code.py"  # an untracked file inside a checkout of something else
  installed.parent.mkdir()
  installed.write_text("x = 1\n")
  assert environment.git_commit(installed) is None


def test_the_start_of_a_process_is_described():
  facts = environment.describe()
  assert facts.keys() == {"git_commit", "host", "versions"} and facts["host"]
  assert facts["versions"]["jax"] == jax.__version__ and facts["versions"]["trainer"] == trainer.__version__
  assert {"python", "jaxlib", "flax", "orbax-checkpoint"} <= facts["versions"].keys()
