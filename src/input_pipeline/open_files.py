"""An LRU cache of open files that stays below the descriptor limit of the process."""

from __future__ import annotations

import contextlib
import functools
import itertools
import resource
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

_SHARE = 4  # a quarter of the limit: checkpoints, sockets and libraries need the rest
_MOST = 2**14  # files that are open if there is no limit


class Closable(Protocol):
  """What `LastUsed` opens."""

  def close(self) -> None: ...


X = TypeVar("X", bound=Closable)


class LastUsed(Generic[X]):
  """A file that is opened when it is used, and stays open while it is among the last used ones of the process."""

  def __init__(self, open_file: Callable[[], X]) -> None:
    self._open_file = open_file
    self._lock = threading.Lock()
    self._file: X | None = None

  def __reduce__(self) -> tuple[Any, ...]:
    return LastUsed, (self._open_file,)  # closed, in another process

  @contextlib.contextmanager
  def opened(self) -> Iterator[X]:
    """The open file, for one thread at a time. Closes it if the block raises: a reader may fail ever after."""
    with self._lock:
      if self._file is None:
        _all().make_room()
        self._file = self._open_file()
      _all().used(self)
      try:
        yield self._file
      except BaseException:
        self._close()
        raise

  def close(self) -> None:
    """Closes the file until it is used again. Idempotent."""
    with self._lock:
      self._close()

  def close_if_idle(self) -> bool:
    """Whether the file is closed now. It stays open if a thread uses it."""
    if not self._lock.acquire(blocking=False):
      return False
    try:
      self._close()
    finally:
      self._lock.release()
    return True

  def __del__(self) -> None:
    self._close()

  def _close(self) -> None:
    file, self._file = self._file, None
    if file is not None:
      with contextlib.suppress(RuntimeError):  # a reader of ArrayRecord that failed raises the same error again
        file.close()


class _All:
  """The open files of the process, the last used one last."""

  def __init__(self, most: int) -> None:
    self._most = most
    self._lock = threading.Lock()
    self._files: weakref.WeakKeyDictionary[LastUsed, None] = weakref.WeakKeyDictionary()

  def used(self, file: LastUsed) -> None:
    with self._lock:
      self._files.pop(file, None)
      self._files[file] = None

  def make_room(self) -> None:
    """Closes the files whose use is longest ago, so that one more may be opened."""
    with self._lock:
      for file in list(itertools.islice(self._files, max(0, len(self._files) + 1 - self._most))):
        if file.close_if_idle():
          del self._files[file]


@functools.cache
def _all() -> _All:
  soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
  return _All(max(8, _MOST if soft == resource.RLIM_INFINITY else soft // _SHARE))
