"""Locks of files and folders between processes, on file systems that have them."""

from __future__ import annotations

import contextlib
import errno
import os
from typing import Any

UNSUPPORTED = {errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL, errno.EBADF}


def locked(descriptor: int, *, shared: bool, wait: bool = False) -> bool | None:
  """Whether this process holds a lock (flock) of the open file or folder now; None: its file system has no locks.

  wait: until other processes have freed it. The lock ends with the descriptor, so also with the process.
  """
  import fcntl

  try:
    fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
  except BlockingIOError:
    return False
  except OSError as error:
    if error.errno not in UNSUPPORTED:
      raise
    return None
  return True


class FolderLock:
  """A lock of a folder, which ends with this object. entered: as `locked`; None also if the folder cannot be opened."""

  def __init__(self, path: Any, *, shared: bool) -> None:
    """path: in an object store there is no lock."""
    self._descriptor = -1
    self.entered: bool | None = None
    if "://" not in str(path):
      with contextlib.suppress(OSError):
        self._descriptor = os.open(path, os.O_RDONLY)
        self.entered = locked(self._descriptor, shared=shared)

  def share(self) -> None:
    """Keeps the lock, together with others that share it."""
    if self._descriptor >= 0:
      locked(self._descriptor, shared=True)

  def is_at(self, path: Any) -> bool:
    """Whether the folder that was locked is still the one at `path`."""
    try:
      return os.path.samestat(os.fstat(self._descriptor), os.stat(path))
    except FileNotFoundError:
      return False

  def release(self) -> None:
    """Ends the lock now."""
    descriptor, self._descriptor = self._descriptor, -1
    if descriptor >= 0:
      os.close(descriptor)

  def __del__(self) -> None:
    self.release()
