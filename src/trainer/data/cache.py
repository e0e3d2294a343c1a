"""Folders that are expensive to make, made once, whole or not at all, whoever else wants them at the same time."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

Log = Callable[[str], None]


def entry(
  directory: str, name: str, *, build: Callable[[Path], None], fault: Callable[[Path], str | None], log: Log
) -> Path:
  """The folder {directory}/{name}, made by `build` if it is absent or damaged.

  `build` fills an empty temporary folder, which is then renamed: a killed build leaves no entry, and one that fails
  leaves nothing at all. `fault` tells what is wrong with a finished entry, or None. Processes that want the same entry
  wait for the first one; a good entry needs no lock and no right to write. Raises ValueError when the directory cannot
  be written.
  """
  if "://" in directory:
    raise ValueError(f"dataset_cache_directory={directory} is not local: give a folder of this machine")
  root = Path(directory).expanduser()
  final = root / name
  if final.is_dir() and fault(final) is None:
    return final
  fresh = [folder for folder in (root, *root.parents) if not folder.exists()]
  try:
    root.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=root))
  except OSError as error:
    raise ValueError(f"dataset_cache_directory={directory} cannot be written: {error}; give another folder") from error
  try:
    with _locked(root / f".{name}.lock"):
      if final.is_dir():
        reason = fault(final)
        if reason is None:
          return final
        log(f"the cached {final} is damaged ({reason}): making it again")
        final.rename(temporary / "damaged")
      whole = temporary / "whole"
      whole.mkdir()
      build(whole)
      try:
        whole.rename(final)
      except OSError:
        # On a shared file system another host does not see the lock; who renames first has made the same entry.
        if not final.is_dir():
          raise
  finally:
    shutil.rmtree(temporary, ignore_errors=True)
    with suppress(OSError):  # not empty: of use
      for folder in fresh:
        folder.rmdir()
  return final


@contextmanager
def _locked(path: Path) -> Iterator[None]:
  """Holds an exclusive lock on a file, which is there only meanwhile; the system frees it when the process dies."""
  import fcntl

  while True:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
      fcntl.flock(descriptor, fcntl.LOCK_EX)
      if _is_at(descriptor, path):
        try:
          yield
        finally:
          path.unlink(missing_ok=True)
        return
      # Whoever held it has removed the file: somebody else may hold the lock on a new one.
    finally:
      os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
  """Whether the open file is the one that has this name now."""
  try:
    return os.path.samestat(os.fstat(descriptor), path.stat())
  except FileNotFoundError:
    return False
