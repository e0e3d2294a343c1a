"""A new folder that exists whole or not at all."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

from trainer.checkpoint import run_id
from trainer.config.errors import ConfigError

_FLUSH_SECONDS = 0.2  # between two rounds of the thread that flushes


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
      if remote:
        yield work
      else:
        with _flushed_meanwhile(Path(work)):
          yield work
        _flush(Path(work))
        os.replace(work, target)
    except BaseException:
      with contextlib.suppress(OSError):  # report the first error
        work.rmtree()
      raise
  except OSError as error:
    raise ConfigError(f"{path}: cannot be written: {error}. Make room there, or give another folder.") from error


@contextlib.contextmanager
def _flushed_meanwhile(folder: Path) -> Iterator[None]:
  """While the block runs, a thread makes the disk write what is in `folder`. Otherwise the disk would wait for its end.

  Raises OSError at the end of the block if the disk has failed. Linux reports a failed write only once.
  """
  ended = threading.Event()

  def flush() -> None:
    while not ended.wait(_FLUSH_SECONDS):
      with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
        _flush(folder)

  with futures.ThreadPoolExecutor(1) as pool:
    flushing = pool.submit(flush)
    try:
      yield
    finally:
      ended.set()
    flushing.result()


def _flush(folder: Path) -> None:
  """Returns when all files and folders in `folder` are on the disk."""
  for path in (*folder.rglob("*"), folder):
    opened = os.open(path, os.O_RDONLY)
    try:
      os.fsync(opened)
    finally:
      os.close(opened)
