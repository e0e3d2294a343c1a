"""One writer per run: a second process on the same run folder would overwrite the checkpoints of the first."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator

from trainer.config.errors import ConfigError
from trainer.observe.files import is_object_store

_UNSUPPORTED = {errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL, errno.EBADF}
_POLL_SECONDS = 0.1


@contextlib.contextmanager
def exclusive(directory: str, timeout: float, log: Callable[[str], None]) -> Iterator[None]:
  """Locks the run's folder, which must exist. The system frees the lock when the process ends in any way.

  Waits up to `timeout` seconds for another process to release it, then raises ConfigError. Object stores and file
  systems without flock have no lock: there the launcher must start a run only once.
  """
  import fcntl

  if is_object_store(directory):
    yield
    return
  descriptor = os.open(directory, os.O_RDONLY)
  try:
    deadline = time.monotonic() + timeout
    announced = False
    while True:
      try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        break
      except BlockingIOError:
        if time.monotonic() > deadline:
          raise ConfigError(
            f"another process is training in {directory} and has not ended within {timeout:g} s: two would overwrite "
            "each other's checkpoints. End it, or choose another run_name"
          ) from None
      except OSError as error:
        if error.errno not in _UNSUPPORTED:
          raise
        log(f"Cannot check whether another process trains in {directory}: this file system has no locks ({error}).")
        break
      if not announced:
        log(f"Another process is training in {directory}; waiting up to {timeout:g} s for it to end.")
        announced = True
      time.sleep(_POLL_SECONDS)
    yield
  finally:
    os.close(descriptor)


def take_over(directory: str) -> None:
  """Locks the run's folder until this process ends, as soon as the primary before it has released the lock.

  Does not wait: that primary is dead, or about to end.
  """
  if is_object_store(directory):
    return
  descriptor = os.open(directory, os.O_RDONLY)
  threading.Thread(target=_lock, args=(descriptor,), name="lock of the run", daemon=True).start()


def _lock(descriptor: int) -> None:
  import fcntl

  with contextlib.suppress(OSError):  # a file system without locks: `exclusive` has said so
    fcntl.flock(descriptor, fcntl.LOCK_EX)
