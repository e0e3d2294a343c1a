"""A new folder that exists whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.checkpoint import run_id
from trainer.config.errors import ConfigError


@contextlib.contextmanager
def new_folder(path: str) -> Iterator[Any]:
  """An epath to write files to, which is at `path` after the block, or nowhere if the block raises.

  Locally the folder gets its name at the end, when all of it is on the disk. In an object store, write the file that
  readers look for last. Raises ConfigError if `path` has files already, or if the storage fails.
  """
  target = run_id.folder(path.rstrip("/"))
  remote = "://" in str(target)
  work = target if remote else target.with_name(f"{target.name}.unfinished")
  try:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
      raise ConfigError(f"{path}: has files already. Give a new folder, or delete it.")
    if work != target and work.exists():  # of a process that was killed
      work.rmtree()
    work.mkdir(parents=True, exist_ok=True)
    try:
      yield work
      if not remote:
        _flush(Path(work))
        os.replace(work, target)
    except BaseException:
      with contextlib.suppress(OSError):  # report the first error
        work.rmtree()
      raise
  except OSError as error:
    raise ConfigError(f"{path}: cannot be written: {error}. Make room there, or give another folder.") from error


def _flush(folder: Path) -> None:
  """Returns when all files and folders in `folder` are on the disk."""
  for path in (*folder.rglob("*"), folder):
    opened = os.open(path, os.O_RDONLY)
    try:
      os.fsync(opened)
    finally:
      os.close(opened)
