"""One writer per run: a second process on the same run folder would overwrite what the first one saves."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator

from trainer.observe.files import is_object_store

UNSUPPORTED = {errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL, errno.EBADF}


@contextlib.contextmanager
def alone(directory: str, patience: float, say: Callable[[str], None]) -> Iterator[None]:
  """Holds the run's folder, which exists; the system frees it when the process ends, however it ends.

  Waits up to `patience` seconds for another process that has it, and then raises ValueError. Object stores and file
  systems without flock cannot tell: there it is the launcher's business to start a run once.
  """
  import fcntl

  if is_object_store(directory):
    yield
    return
  descriptor = os.open(directory, os.O_RDONLY)
  try:
    deadline = time.monotonic() + patience
    told = False
    while True:
      try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        break
      except BlockingIOError:
        if time.monotonic() > deadline:
          raise ValueError(
            f"another process is training in {directory} and has not ended within {patience:g} s: two would overwrite "
            "each other's checkpoints. End it, or choose another run_name"
          ) from None
      except OSError as error:
        if error.errno not in UNSUPPORTED:
          raise
        say(f"Whether another process trains in {directory} cannot be told here ({error}).")
        break
      if not told:
        say(f"Another process is training in {directory}; waiting up to {patience:g} s for its end.")
        told = True
      time.sleep(0.1)
    yield
  finally:
    os.close(descriptor)
