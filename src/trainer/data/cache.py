"""A cache of folders that are expensive to make. Each is made once and atomically, also when processes race."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trainer.config.errors import ConfigError

Log = Callable[[str], None]


def entry(
  directory: str, name: str, *, build: Callable[[Path], None], fault: Callable[[Path], str | None], log: Log
) -> Path:
  """The folder {directory}/{name}, made by `build` if it is absent or damaged.

  `build` fills an empty temporary folder, which is then renamed: a killed build leaves no entry, and a failed build
  leaves no files. `fault` returns what is wrong with a finished entry, or None. Processes that want the same entry
  wait for the first process; a good entry needs neither a lock nor write permission. Raises ConfigError when the
  directory cannot be written.
  """
  if "://" in directory:
    raise ConfigError(f"dataset_cache_directory={directory} is not a local path. Set it to a folder of this machine.")
  root = Path(directory).expanduser()
  final = root / name
  if final.is_dir() and fault(final) is None:
    return final
  fresh = [folder for folder in (root, *root.parents) if not folder.exists()]
  try:
    root.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=root))
  except OSError as error:
    problem = f"dataset_cache_directory={directory} cannot be written: {error}"
    raise ConfigError(f"{problem}. Give another folder.") from error
  try:
    with _locked(root / f".{name}.lock"):
      if final.is_dir():
        reason = fault(final)
        if reason is None:
          return final
        log(f"The cached {final} is damaged ({reason}). Making it again.")
        final.rename(temporary / "damaged")
      whole = temporary / "whole"
      whole.mkdir()
      build(whole)
      try:
        whole.rename(final)
      except OSError:
        # On a shared file system another host may not see the lock. If it renamed first, its entry is the same.
        if not final.is_dir():
          raise
  finally:
    shutil.rmtree(temporary, ignore_errors=True)
    with suppress(OSError):  # not empty: in use
      for folder in fresh:
        folder.rmdir()
  return final


@contextmanager
def _locked(path: Path) -> Iterator[None]:
  """Holds an exclusive lock on a file that exists only while locked. The lock ends with the process."""
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
      # The previous holder removed the file, so another process may hold the lock on a new file.
    finally:
      os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
  """Whether the open file is still the file at `path`."""
  try:
    return os.path.samestat(os.fstat(descriptor), path.stat())
  except FileNotFoundError:
    return False
