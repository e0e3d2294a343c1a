"""A new folder that exists whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from input_pipeline import remote
from input_pipeline.locks import FolderLock
from input_pipeline.places import Place
from trainer.checkpoint import run_folder
from trainer.config.errors import ConfigError

_CLAIM = "unfinished."  # and some digits: a file in a folder of an object store while a process writes there


@contextlib.contextmanager
def new_folder(path: str) -> Iterator[Place]:
  """A place to write files to, which is at `path` after the block, or nowhere if the block raises.

  Locally the folder gets its name at the end, when all of it is on the disk. In an object store, write the file that
  readers look for last. Raises ConfigError if `path` has files already, if another process writes it now, or if the
  storage fails.
  """
  target = run_folder.folder(path.rstrip("/"))
  remote.require_bucket(path, target.address)
  try:
    _require_new(target)
    with _claimed(target) if target.is_remote else _locked(target) as work:
      try:
        if work == target:
          yield work
        else:
          _require_new(target)  # no process writes it any more
          yield work
          _flush(Path(work))
          os.replace(work, target)
      except BaseException:
        with contextlib.suppress(OSError):  # report the first error
          work.rmtree()
        raise
  except OSError as error:
    raise ConfigError(f"{path}: cannot be written: {error}. Make room there, or give another folder.") from error


def _require_new(target: Place) -> None:
  if target.exists() and (not target.is_dir() or any(target.iterdir())):
    raise ConfigError(f"{target}: has files already. Give a new folder, or delete it.")


def _already_exists_error(target: Place) -> ConfigError:
  return ConfigError(f"{target}: another process writes this folder. Wait for its end, or give another folder.")


@contextlib.contextmanager
def _locked(target: Place) -> Iterator[Place]:
  """Yields an empty folder next to `target`, which has a lock or, where locks are missing, a random name."""
  work = target.with_name(f"{target.name}.unfinished")
  work.mkdir(parents=True, exist_ok=True)
  lock = FolderLock(work, shared=False)
  if lock.entered is False:
    raise _already_exists_error(target)
  if lock.entered is None:
    with contextlib.suppress(OSError):
      os.rmdir(work)
    work = target.with_name(f"{target.name}.{secrets.token_hex(4)}.unfinished")
    work.mkdir()
  elif not lock.is_at(work):  # the process that had the lock has just ended
    raise _already_exists_error(target)
  for path in work.iterdir():  # of a process that was killed
    path.rmtree() if path.is_dir() else path.unlink()
  yield work


@contextlib.contextmanager
def _claimed(target: Place) -> Iterator[Place]:
  """`target`, in an object store, while it has a file that tells other processes that this one writes there."""
  claim = target / f"{_CLAIM}{secrets.token_hex(4)}"
  claim.write_text("")
  try:
    if any(path.name != claim.name for path in target.iterdir()):
      raise _already_exists_error(target)  # two processes may find each other, and both end
    yield target
  finally:
    claim.unlink(missing_ok=True)


def _flush(folder: Path) -> None:
  for path in (*folder.rglob("*"), folder):
    opened = os.open(path, os.O_RDONLY)
    try:
      os.fsync(opened)
    finally:
      os.close(opened)
