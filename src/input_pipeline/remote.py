"""Input files with an address such as gs://BUCKET/NAME, read with fsspec and the package of their object store."""

from __future__ import annotations

import functools
import io
import posixpath
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from input_pipeline.errors import ConfigError, shorten
from input_pipeline.folders import LeftOut, is_set_aside, literal, matches

# Bytes of a request. At 50 ms per request this is above 100 MB/s, and a tokenizer needs less.
_BLOCK = 2**23
_RANGES = 256  # that are requested at a time
# What stores say about an object that changes with its content, the best first.
_VERSIONS = ("generation", "ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified", "updated", "created")


@dataclass(frozen=True)
class RemoteFile:
  """A file of an object store, with the part of pathlib.Path that the readers of documents use."""

  address: str
  size: int  # bytes
  version: str = ""  # which changes with the content; "": the store names none

  def __str__(self) -> str:
    return self.address

  @property
  def name(self) -> str:
    return posixpath.basename(self.address)

  @property
  def suffix(self) -> str:
    return posixpath.splitext(self.name)[1]

  def open(self, mode: str = "rb", buffering: int = _BLOCK) -> BinaryIO:
    """The file, to be read in requests of at least `buffering` bytes. Reading raises OSError, whatever the store."""
    assert mode == "rb", mode
    with _as_os_error():
      return io.BufferedReader(_Raw(self), buffering)


class _Raw(io.RawIOBase):
  """The bytes of a remote file. Each read is one request, so nothing is open between reads."""

  def __init__(self, file: RemoteFile) -> None:
    self._system, self._path = _system(file.address)
    self._size = file.size
    self._place = 0

  def readable(self) -> bool:
    return True

  def seekable(self) -> bool:
    return True

  def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
    self._place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
    return self._place

  def readinto(self, buffer: Any) -> int:
    """Raises OSError if the file cannot be read, or has become shorter."""
    stop = min(self._place + len(buffer), self._size)
    if self._place >= stop:
      return 0
    with _as_os_error():
      data = self._system.cat_file(self._path, start=self._place, end=stop)
    if len(data) != stop - self._place:
      raise OSError(f"it had {self._size} bytes at the start and has become shorter")
    buffer[: len(data)] = data
    self._place = stop
    return len(data)


def is_address(value: str) -> bool:
  """Whether `value` names something in an object store, and not a path of this machine."""
  return "://" in value


def require_bucket(given: str, address: str) -> None:
  """Raises ConfigError, which begins with `given`, if s3:// has no such bucket, or refuses to list it.

  s3fs would create a bucket that is absent, at the first write. Each bucket is asked for once per process.
  """
  scheme, _, rest = address.partition("://")
  if scheme == "s3" and (reason := _refusal(f"s3://{rest.partition('/')[0]}")):
    raise ConfigError(
      f"{given}: {reason}.\nCheck the name of the bucket, and the credentials, region and endpoint of this machine "
      "(AWS_ACCESS_KEY_ID, AWS_PROFILE, AWS_ENDPOINT_URL, ...), or choose gs:// or a folder of this machine."
    )


@functools.cache
def _refusal(bucket: str) -> str:
  """Why a bucket cannot be listed; "": it can."""
  try:
    with _as_os_error():
      system, path = _system(bucket)
      system.info(path)
  except OSError as error:
    return "there is no such bucket" if isinstance(error, FileNotFoundError) else " ".join(str(error).split())
  return ""


def read(key: str, path: str) -> bytes:
  """The content of one file, local or at an address. key: for messages. Raises OSError, FileNotFoundError without it,
  and ConfigError as `find`."""
  if not is_address(path):
    return Path(path).expanduser().read_bytes()
  for file in find(key, path, ()):
    with file.open() as content:
      return content.read()
  raise FileNotFoundError("there is no such file")


def find(key: str, address: str, names: Sequence[str], left: LeftOut | None = None) -> list[RemoteFile]:
  """The files of an address: a file, a pattern with * and ?, or a folder whose files match one of `names`.

  Folders are searched with their subfolders. Hidden names are skipped, and names that begin with _ are left out. No
  file: an empty list. `key`: for messages. left: gets the other files of a folder.
  Raises ConfigError if a package is missing, or the store cannot be reached.
  """
  left = left or LeftOut()
  try:
    with _as_os_error():
      system, path = _system(address)
      found = [file for match in _matches(system, path, left) for file in _files(system, match, names, left)]
  except FileNotFoundError:
    return []
  except OSError as error:
    raise ConfigError(
      f"{key}={shorten(address)}: cannot be listed ({' '.join(str(error).split())}).\n"
      "Check the address, the permissions and the network, or install the package of this kind of address (gs://: "
      "bash setup.sh --gcs in a clone of the trainer, or python -m pip install gcsfs; s3://: the same with s3 and "
      "s3fs), or copy the files here."
    ) from error
  return found


def _matches(system: Any, path: str, left: LeftOut) -> Iterator[dict[str, Any]]:
  """Yields what the store says about the file, the folder or the matches of the pattern `path`."""
  if not any(character in path for character in "*?"):
    yield system.info(path)
    return
  for name, info in system.glob(literal(path), detail=True).items():
    if is_set_aside(name.split("/"), path.split("/")):
      left.add_underscore(system.unstrip_protocol(name))
    elif _hidden(name) <= _hidden(path):
      yield info


def _files(system: Any, match: dict[str, Any], names: Sequence[str], left: LeftOut) -> Iterator[RemoteFile]:
  """Yields the files of a match: the file itself, or the files of a folder."""
  if match["type"] != "directory":
    yield _file(system, match["name"], match)
    return
  folder = match["name"].rstrip("/")
  for path, info in system.find(folder, detail=True).items():
    inside = path.removeprefix(folder)
    if _hidden(inside):
      continue
    if is_set_aside(inside.split("/")):
      left.add_underscore(system.unstrip_protocol(path))
    elif matches(posixpath.basename(path), names):
      yield _file(system, path, info)
    else:
      left.add_file(path, system.unstrip_protocol(path))


def _file(system: Any, path: str, info: dict[str, Any]) -> RemoteFile:
  version = next((str(info[key]) for key in _VERSIONS if info.get(key)), "")
  return RemoteFile(system.unstrip_protocol(path), _size(info), version)


def _hidden(path: str) -> set[str]:
  """The hidden names in a path."""
  return {part for part in path.split("/") if part.startswith(".")}


def _size(info: dict[str, Any]) -> int:
  if info.get("size") is None:
    raise OSError(f"the store does not give the size of {info['name']}")
  return int(info["size"])


def ranges(files: Sequence[RemoteFile], wanted: Sequence[tuple[int, int]]) -> Iterator[bytes]:
  """Yields bytes start to stop (excluded) of each file, with many requests at a time. Raises OSError."""
  for first in range(0, len(files), _RANGES):
    group, limits = files[first : first + _RANGES], wanted[first : first + _RANGES]
    with _as_os_error():
      system, _ = _system(group[0].address)
      paths = [_system(file.address)[1] for file in group]
      starts, stops = (list(side) for side in zip(*limits))
      yield from system.cat_ranges(paths, starts, stops, on_error="raise")


def _system(address: str) -> tuple[Any, str]:
  """(file system of fsspec, path in it). Raises ImportError or ValueError if no package reads such an address."""
  from fsspec import core

  return core.url_to_fs(address)


@contextmanager
def _as_os_error() -> Iterator[None]:
  """Makes an OSError of any error: every package of an object store has errors of its own."""
  try:
    yield
  except OSError:
    raise
  except Exception as error:
    raise OSError(f"{type(error).__name__}: {error}") from error
