"""Input files with an address such as gs://BUCKET/NAME, read with fsspec and the package of their object store."""

from __future__ import annotations

import io
import posixpath
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from input_pipeline import places, storage
from input_pipeline.folders import LeftOut, is_set_aside, literal, matches
from input_pipeline.input_errors import ConfigError, shorten
from input_pipeline.storage import StorageError

SCHEMES = ("gs", "s3")
_LISTING = 2**28  # bytes: what a listing of a large folder may take
_RANGES = 256  # that are requested at a time
# What stores say about an object that changes with its content, the best first.
_VERSIONS = ("generation", "ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified", "updated", "created")
_REMEDY = (
  "Check the address, the credentials, permissions, region and endpoint of this machine (AWS_ACCESS_KEY_ID, "
  "AWS_PROFILE, AWS_ENDPOINT_URL, ...), or install the package of this kind of address (gs://: bash setup.sh --gcs in "
  "a clone of the trainer, or python -m pip install gcsfs; s3://: the same with s3 and s3fs), or choose a folder here."
)


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

  def open(self, mode: str = "rb", buffering: int = storage.BLOCK) -> BinaryIO:
    """The file, to be read in requests of at least `buffering` bytes. Reading raises OSError, whatever the store."""
    assert mode == "rb", mode
    return io.BufferedReader(places.Reader(self.address, self.size), buffering)


def require_address(given: str, value: str, schemes: Collection[str] | None = (*SCHEMES, "file", "memory")) -> None:
  """Raises ConfigError, which begins with `given`, if `value` is neither a path of this machine nor a possible address
  of an object store. Asks no store. schemes: of which addresses; None: any. The last two are fsspec's, for tests."""
  if "://" not in value and not re.match(r"\w+:/", value):
    return
  scheme, _, rest = value.partition(":")
  if not rest.startswith("//") or (schemes is not None and scheme not in schemes):
    raise ConfigError(
      f"{given}: must be gs://BUCKET/FOLDER, or a folder of this machine, or s3://BUCKET/FOLDER.\n"
      "Write one of these. A local path has no '://', and starts with ./ if its first name ends in ':'."
    )
  for problem in bucket_problems(given, value) if scheme in SCHEMES else ():
    raise ConfigError(problem)


def bucket_problems(given: str, address: str) -> Iterator[str]:
  """Yields a message if `address`, shown as `given`, names a bucket that cannot exist."""
  scheme, _, rest = address.partition("://")
  bucket = rest.partition("/")[0]
  if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]", bucket):
    yield (
      f"{given}: '{bucket}' is not a bucket name: it has 3 or more of a-z, 0-9, - _ and ., and begins and ends with a "
      f"letter or digit.\nWrite {scheme}://BUCKET/FOLDER with the name of your bucket."
    )


def require_bucket(given: str, address: str) -> None:
  """Raises ConfigError, which begins with `given`, if there is no such bucket, or it may not be listed, and
  StorageError if the store does not work now."""
  scheme, _, rest = address.partition("://")
  bucket = rest.partition("/")[0]
  if scheme not in SCHEMES:
    return
  place = f"{scheme}://{bucket}"
  try:
    with _explained(given):
      if scheme == "s3":  # s3fs would create a bucket that is absent, at the first write
        storage.ask("found", place, "info")
      else:
        storage.perform("listed", place, lambda: _list_one(place))
  except FileNotFoundError:
    raise ConfigError(f"{given}: there is no such bucket.\n{_REMEDY}") from None


def _list_one(place: str) -> None:
  """Lists one object of a bucket of gs://. Its metadata needs a permission that users of objects may lack."""
  system, bucket = storage.system(place)
  system.call("GET", "b/{}/o", bucket, maxResults=1, json_out=True, timeout=storage.seconds())


@contextmanager
def _explained(given: str) -> Iterator[None]:
  """Makes a ConfigError of a StorageError that will not pass."""
  try:
    yield
  except StorageError as error:
    if error.passes:
      raise
    raise ConfigError(f"{given}: {error}.\n{_REMEDY}") from None


def read(key: str, path: str) -> bytes:
  """The content of one file, local or at an address. key: for messages. Raises OSError, FileNotFoundError without it,
  and ConfigError as `find`."""
  if not storage.is_address(path):
    return Path(path).expanduser().read_bytes()
  for file in find(key, path, ()):
    with file.open() as content:
      return content.read()
  raise FileNotFoundError("there is no such file")


def find(key: str, address: str, names: Sequence[str], left: LeftOut | None = None) -> list[RemoteFile]:
  """The files of an address: a file, a pattern with * and ?, or a folder whose files match one of `names`.

  Folders are searched with their subfolders. Hidden names are skipped, and names that begin with _ are left out. No
  file: an empty list. `key`: for messages. left: gets the other files of a folder.
  Raises ConfigError if a package is missing or the store refuses, and StorageError if it does not work now.
  """
  left = left or LeftOut()
  require_address(f"{key}={shorten(address)}", address, None)

  with _explained(f"{key}={shorten(address)}"):
    try:
      return [file for match in _matches(address, left) for file in _files(match, names, left)]
    except FileNotFoundError:
      return []


def _matches(address: str, left: LeftOut) -> Iterator[dict[str, Any]]:
  """Yields what the store says about the file, the folder or the matches of the pattern `address`."""
  if not any(character in address for character in "*?"):
    yield storage.ask("found", address, "info") | {"address": address}
    return
  for name, info in storage.ask("listed", literal(address), "glob", detail=True).items():
    found, path = storage.system(address)
    place = found.unstrip_protocol(name)
    if is_set_aside(name.split("/"), path.split("/")):
      left.add_underscore(place)
    elif _hidden(name) <= _hidden(path):
      yield info | {"address": place}


def _files(match: dict[str, Any], names: Sequence[str], left: LeftOut) -> Iterator[RemoteFile]:
  unstrip = storage.system(match["address"])[0].unstrip_protocol
  if match["type"] != "directory":
    yield _file(unstrip(match["name"]), match)
    return
  folder = match["name"].rstrip("/")
  for path, info in storage.ask("listed", unstrip(folder), "find", detail=True, size=_LISTING).items():
    inside = path.removeprefix(folder)
    if _hidden(inside):
      continue
    if is_set_aside(inside.split("/")):
      left.add_underscore(unstrip(path))
    elif matches(posixpath.basename(path), names):
      yield _file(unstrip(path), info)
    else:
      left.add_file(path, unstrip(path))


def _file(address: str, info: dict[str, Any]) -> RemoteFile:
  version = next((str(info[key]) for key in _VERSIONS if info.get(key)), "")
  return RemoteFile(address, _size(info), version)


def _hidden(path: str) -> set[str]:
  return {part for part in path.split("/") if part.startswith(".")}


def _size(info: dict[str, Any]) -> int:
  if info.get("size") is None:
    raise OSError(f"the store does not give the size of {info['name']}")
  return int(info["size"])


def ranges(files: Sequence[RemoteFile], wanted: Sequence[tuple[int, int]]) -> Iterator[bytes]:
  """Yields bytes start to stop (excluded) of each file, with many requests at a time. Raises OSError."""
  for first in range(0, len(files), _RANGES):
    group, limits = files[first : first + _RANGES], wanted[first : first + _RANGES]
    starts, stops = (list(side) for side in zip(*limits))

    def read(group: Sequence[RemoteFile] = group, starts: list[int] = starts, stops: list[int] = stops) -> list[bytes]:
      found, _ = storage.system(group[0].address)
      paths = [found._strip_protocol(file.address) for file in group]
      limit = storage.in_time(found, sum(stops) - sum(starts))
      return found.cat_ranges(paths, starts, stops, on_error="raise", **limit)

    yield from storage.perform("read", group[0].address, read)
