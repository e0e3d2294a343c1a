"""Which code ran, and where: recorded with the start of each process."""

from __future__ import annotations

import functools
import importlib.metadata
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import trainer

_PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "optax", "orbax-checkpoint", "numpy")
_GIT_SECONDS = 2.0  # a slow network file system must not delay the start


def describe() -> dict[str, Any]:
  """git_commit (None outside a checkout), host, versions: fields of the run_start event."""
  return {"git_commit": _own_commit(), "host": host(), "versions": versions()}


def host() -> str:
  return socket.gethostname()


@functools.cache
def _own_commit() -> str | None:
  return git_commit(Path(trainer.__file__))


def git_commit(file: Path) -> str | None:
  """The commit of the checkout that tracks `file`, with "-dirty" if tracked files have changes.

  None if `file` is not tracked (an installed package), git is missing, or git does not answer in time.
  """
  git = ["git", "--no-optional-locks", "-C", str(file.parent)]
  commands = (
    ["ls-files", "--error-unmatch", "--", file.name],
    ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],  # no tag, so that only the commit remains
  )
  try:
    done = [
      subprocess.run([*git, *command], capture_output=True, text=True, timeout=_GIT_SECONDS, check=True)
      for command in commands
    ]
  except (OSError, subprocess.SubprocessError):
    return None
  return done[-1].stdout.strip() or None


def cpu_model() -> str:
  """The model of the CPU, as Linux names it; "" where it is not known."""
  try:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
  except OSError:
    return ""
  return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def versions() -> dict[str, str]:
  """Versions of Python, of the trainer, and of the installed packages that compute and save."""
  found = {"python": sys.version.split()[0], "trainer": trainer.__version__}
  for package in _PACKAGES:
    try:
      found[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      continue
  return found
