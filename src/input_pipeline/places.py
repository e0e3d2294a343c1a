"""Files and folders of this machine and of object stores, with the methods of pathlib.Path, through `storage`."""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import io
import os
import posixpath
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from input_pipeline import storage
from input_pipeline.storage import BLOCK, StorageError

T = TypeVar("T")
_NOT_THERE = (errno.ELOOP, errno.ENAMETOOLONG)


class Reader(io.RawIOBase):
  """The bytes of an object. Each read is one request, so nothing is open between reads."""

  def __init__(self, address: str, size: int) -> None:
    self._address, self._size, self._place = address, size, 0

  def readable(self) -> bool:
    return True

  def seekable(self) -> bool:
    return True

  def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
    self._place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
    return self._place

  def readinto(self, buffer: Any) -> int:
    """Raises OSError if the object cannot be read, or has become shorter."""
    stop = min(self._place + len(buffer), self._size)
    if self._place >= stop:
      return 0
    count = stop - self._place
    data = storage.ask("read", self._address, "cat_file", start=self._place, end=stop, size=count)
    if len(data) != count:
      raise OSError(f"it had {self._size} bytes at the start and has become shorter")
    buffer[:count] = data
    self._place = stop
    return count


@dataclass(frozen=True)
class Writer:
  """The bytes of a file that is being written."""

  address: str
  file: Any

  def write(self, data: Any) -> None:
    """Raises StorageError."""
    with storage.access("written", self.address):
      self.file.write(data)


@dataclass(frozen=True, order=True)
class Place:
  """A file or a folder of this machine (an absolute path) or of an object store, with methods of pathlib.Path.

  All raise StorageError. An object store has no folders: one is there while something is in it."""

  address: str

  def __str__(self) -> str:
    return self.address

  def __fspath__(self) -> str:
    return self.address

  def __truediv__(self, name: str | os.PathLike[str]) -> Place:
    return Place(posixpath.join(self.address, name))

  @property
  def name(self) -> str:
    return posixpath.basename(self.address)

  @property
  def suffix(self) -> str:
    return posixpath.splitext(self.name)[1]

  @property
  def parent(self) -> Place:
    return Place(posixpath.dirname(self.address))

  def with_name(self, name: str) -> Place:
    return self.parent / name

  @property
  def is_remote(self) -> bool:
    return storage.is_address(self.address)

  def _ask(self, operation: str, method: str, *arguments: Any, **options: Any) -> Any:
    return storage.ask(operation, self.address, method, *arguments, **options)

  def _local(self, operation: str, work: Callable[[Path], T]) -> T:
    return storage.perform(operation, self.address, lambda: work(Path(self.address)))

  def stat(self) -> Found:
    """Raises FileNotFoundError."""
    if self.is_remote:
      told = self._ask("found", "info")
      at = next((told[key] for key in ("mtime", "LastModified", "updated") if told.get(key)), 0.0)
      return Found(told["type"] == "directory", told.get("size") or 0, getattr(at, "timestamp", lambda: float(at))())
    found = self._local("found", Path.stat)
    return Found(stat.S_ISDIR(found.st_mode), found.st_size, found.st_mtime)

  def exists(self) -> bool:
    return self._found() is not None

  def is_dir(self) -> bool:
    found = self._found()
    return found is not None and found.is_folder

  def _found(self) -> Found | None:
    try:
      return self.stat()
    except (FileNotFoundError, NotADirectoryError):
      return None
    except StorageError as error:
      if error.errno not in _NOT_THERE:
        raise
      return None

  def iterdir(self) -> Iterator[Place]:
    """The content of a folder, sorted by name. Raises FileNotFoundError."""
    if self.is_remote:
      paths = self._ask("listed", "ls", detail=False)
      names = {posixpath.basename(path.rstrip("/")) for path in paths} - {""}
      # Some tools make an object with the name of the folder and a slash.
      mine = posixpath.basename(self.address.rstrip("/"))
      names -= {mine} if len(paths) == 1 and not self.is_dir() else set()
    else:
      names = set(self._local("listed", lambda path: os.listdir(path)))
    return iter([self / name for name in sorted(names)])

  def glob(self, pattern: str) -> Iterator[Place]:
    """What is in the folder with a name that matches; nothing if there is no folder."""
    with contextlib.suppress(FileNotFoundError):
      yield from [place for place in self.iterdir() if fnmatch.fnmatchcase(place.name, pattern)]

  def read_bytes(self) -> bytes:
    return self._ask("read", "cat_file") if self.is_remote else self._local("read", Path.read_bytes)

  def read_text(self) -> str:
    return self.read_bytes().decode()

  def write_bytes(self, data: bytes) -> None:
    """The file has its new content, or its old one; never a part."""
    if self.is_remote:
      self._ask("written", "pipe_file", data, size=len(data))
      return

    def write(path: Path) -> None:
      new = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")  # other processes may write the same file
      try:
        new.write_bytes(data)
        new.replace(path)
      except OSError:
        with contextlib.suppress(OSError):  # report the first error
          new.unlink(missing_ok=True)
        raise

    self._local("written", write)

  def write_text(self, text: str) -> None:
    self.write_bytes(text.encode())

  @contextlib.contextmanager
  def open(self, mode: str = "rb", buffering: int = BLOCK) -> Iterator[Any]:
    """The bytes of the file, to read ("rb") or to write as the whole file ("wb")."""
    if self.is_remote and mode == "rb":
      with io.BufferedReader(Reader(self.address, self.stat().size), buffering) as reader:
        yield reader
      return
    with storage.access("opened", self.address):
      path: Any = storage.system(self.address)[0] if self.is_remote else Path(self.address)
      file = path.open(self.address, mode) if self.is_remote else path.open(mode)
    if mode == "rb":
      with file:
        yield file
      return
    try:
      yield Writer(self.address, file)
    except BaseException:
      if not self.is_remote:  # to close an upload would complete it
        with contextlib.suppress(OSError):  # report the first error
          file.close()
      raise
    with storage.access("written", self.address):
      file.close()

  def mkdir(self, *, parents: bool = False, exist_ok: bool = False) -> None:
    if not self.is_remote:
      self._local("made", lambda path: path.mkdir(parents=parents, exist_ok=exist_ok))

  def unlink(self, missing_ok: bool = False) -> None:
    with contextlib.suppress(*([FileNotFoundError] if missing_ok else [])):
      self._ask("deleted", "rm_file") if self.is_remote else self._local("deleted", Path.unlink)

  def rmtree(self) -> None:
    if self.is_remote:
      self._ask("deleted", "rm", recursive=True)
    else:
      self._local("deleted", shutil.rmtree)

  def rename(self, target: Place) -> None:
    """Of this machine; an object store copies."""
    self._local("renamed", lambda path: path.rename(target))

  def copy(self, target: Place) -> None:
    """Copies a file of an object store."""
    self._ask("copied", "cp_file", storage.system(target.address)[1])


def at(path: str) -> Place:
  """The place of a path of this machine, perhaps relative or with ~, or of an address."""
  return Place(path if storage.is_address(path) else os.path.abspath(os.path.expanduser(path)))


@dataclass(frozen=True)
class Found:
  """What there is at a place. modified: in seconds since 1970; 0.0: unknown."""

  is_folder: bool
  size: int  # bytes; 0 of a folder in an object store
  modified: float
