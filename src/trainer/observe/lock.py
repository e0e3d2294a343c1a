"""One launch per run: the processes of a second one would overwrite the checkpoints of the first."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from trainer.config.errors import ConfigError
from trainer.observe.files import is_object_store

FILE = "launch_id"  # {run}/launch_id: the launch whose processes hold the lock of the run's folder, or held it last
_UNSUPPORTED = {errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL, errno.EBADF}
_POLL_SECONDS = 0.1


@contextlib.contextmanager
def held(directory: str, launch: str, timeout: float, log: Callable[[str], None]) -> Iterator[None]:
  """Holds the lock of the run's folder, together with other processes of the same launch. Creates the folder.

  launch: the id of the launch; all ids have the same length. Every process that may ever write the run's files holds
  the lock, so that no other launch begins when one of these processes takes over from another. The system frees the
  lock when the process ends in any way. Waits up to `timeout` seconds for processes of other launches, then raises
  ConfigError. Object stores and file systems without flock have no lock: there a run must be launched only once.
  """
  if is_object_store(directory):
    yield
    return
  os.makedirs(directory, exist_ok=True)
  descriptor = os.open(directory, os.O_RDONLY)
  try:
    deadline = time.monotonic() + timeout
    announced = False
    while not _entered(descriptor, Path(directory, FILE), launch, log):
      if time.monotonic() > deadline:
        raise ConfigError(
          f"another process is training in {directory} and has not ended within {timeout:g} s: two would overwrite "
          "each other's checkpoints. End it, or choose another run_name"
        )
      if not announced:
        log(f"Another process is training in {directory}; waiting up to {timeout:g} s for it to end.")
        announced = True
      time.sleep(_POLL_SECONDS)
    yield
  finally:
    os.close(descriptor)


def _entered(descriptor: int, path: Path, launch: str, log: Callable[[str], None]) -> bool:
  """Whether this process holds the lock now, or there is none."""
  import fcntl

  try:
    if _locked(descriptor, fcntl.LOCK_EX):  # no process holds it
      file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
      try:
        os.pwrite(file, launch.encode(), 0)  # in place: this needs no space on a full disk
      finally:
        os.close(file)
    # LOCK_EX becomes LOCK_SH in two steps. Another launch may get the lock between them, and then writes its own id.
    if _locked(descriptor, fcntl.LOCK_SH) and path.read_bytes() == launch.encode():
      return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
  except FileNotFoundError:  # the file was deleted
    fcntl.flock(descriptor, fcntl.LOCK_UN)
  except OSError as error:
    if error.errno not in _UNSUPPORTED:
      raise
    log(f"Cannot check whether another process trains in {path.parent}: this file system has no locks ({error}).")
    return True
  return False


def _locked(descriptor: int, kind: int) -> bool:
  import fcntl

  try:
    fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
  except BlockingIOError:
    return False
  return True
