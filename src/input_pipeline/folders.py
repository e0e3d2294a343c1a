"""The files below a folder: one rule for all kinds of data.

A folder is searched with its subfolders, also behind links, each once. Hidden names are skipped, and names that begin
with _ are left out. A file with several names is one file.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatch, fnmatchcase
from pathlib import Path, PurePath

from input_pipeline.input_errors import ConfigError, shorten

_MOST_KINDS = 6  # that a line names
# Bytes. Systems allow 4096 for a whole path, and the files of a run add long names of their own.
_LONGEST_PATH, _LONGEST_NAME = 3000, 255


class LeftOut:
  """What a search has left out: the number of entries of each kind, and the first of them."""

  def __init__(self) -> None:
    self._kinds: dict[str, tuple[int, str]] = {}

  def add(self, kind: str, path: object) -> None:
    count, first = self._kinds.get(kind, (0, str(path)))
    self._kinds[kind] = count + 1, first

  def add_underscore(self, path: object) -> None:
    self.add("names that begin with _", path)

  def add_file(self, name: str, path: object) -> None:
    suffix = PurePath(name).suffix
    self.add(f"*{suffix}" if suffix else "files without a suffix", path)

  def __str__(self) -> str:
    kinds = sorted(self._kinds.items(), key=lambda item: -item[1][0])
    parts = [f"{kind}: {count:,} ({first}{', ...' * (count > 1)})" for kind, (count, first) in kinds[:_MOST_KINDS]]
    rest = sum(count for _, (count, _) in kinds[_MOST_KINDS:])
    return "; ".join([*parts, f"others: {rest:,}"] if rest else parts)

  @property
  def note(self) -> str:
    """For the end of a sentence about files that were not found."""
    return f" (not read: {self})" if self._kinds else ""


def as_path(value: str, label: str) -> Path:
  """The local path that `value` means, with ~ expanded; ConfigError if no file can have that name.

  `label` stands before the value in the message: "dataset_path=", "config file ".
  """
  given = label + (shorten(value) if value.isprintable() else ascii(shorten(value)))
  try:
    path = Path(value).expanduser()
    names = [os.fsencode(part) for part in path.parts]
  except RuntimeError:
    if Path(value).parts[0] == "~":
      raise ConfigError(f"{given}: ~ is the home folder, and this user has none.\nSet HOME to a folder.") from None
    raise ConfigError(f"{given}: there is no such user.\nWrite the path without ~.") from None
  except UnicodeEncodeError:
    raise ConfigError(f"{given}: has a character that no file name can have.\nChoose another path.") from None
  if any(b"\0" in part for part in names):
    raise ConfigError(f"{given}: has a NUL, which no file name can have.\nChoose another path.")
  if max(map(len, names), default=0) > _LONGEST_NAME or len(os.fsencode(path.absolute())) > _LONGEST_PATH:
    raise ConfigError(
      f"{given}: is too long. A name may have {_LONGEST_NAME} bytes and a path {_LONGEST_PATH}.\nChoose a shorter path."
    )
  return path


def matches(name: str, patterns: Sequence[str]) -> bool:
  """Whether a name, in upper or lower case, matches one of the patterns."""
  return any(fnmatch(name.lower(), pattern) for pattern in patterns)


def literal(pattern: str) -> str:
  """The pattern for the functions of Python, for which brackets are patterns too: here they stand for themselves."""
  return pattern.replace("[", "[[]")


def is_set_aside(path: Sequence[str], given: Sequence[str] = ()) -> bool:
  """Whether some name of a path begins with _ and is not among the names or patterns `given` by the user.

  Spark and Delta give such names to what is no data: _temporary, _delta_log, _SUCCESS. Python's modules have them too.
  """
  given = [literal(pattern) for pattern in given if pattern.startswith("_")]
  names = [name for name in path if name.startswith("_") and not any(fnmatchcase(name, one) for one in given)]
  return bool(names) and not path[-1].endswith(".py")


def below(root: Path, left: LeftOut, skip: frozenset[str] = frozenset(), given: Sequence[str] = ()) -> Iterator[Path]:
  """Yields the files below `root`, except in folders named in `skip` and those that `is_set_aside` leaves out.

  A folder behind a link has its own name if it is below `root`, else the name of the first link. Raises ConfigError
  with the folder's name if a folder cannot be listed.
  """
  seen: set[str] = set()
  folders, links = deque([root]), deque[Path]()
  while folders or links:
    folder = folders.popleft() if folders else links.popleft()
    try:
      names = sorted(os.listdir(folder))
    except OSError as error:
      remedy = "Allow reading it, or remove the folder."
      raise ConfigError(f"{folder} cannot be listed ({error.strerror}). {remedy}") from error
    if (real := os.path.realpath(folder)) in seen:
      left.add("links to folders that are read already", folder)
      continue
    seen.add(real)
    for path in (folder / name for name in names if not name.startswith(".")):
      if os.path.isdir(path):
        if path.name not in skip:
          (links if path.is_symlink() else folders).append(path)
      elif not is_file(path, left):
        continue
      elif is_set_aside(path.relative_to(root).parts, given):
        left.add_underscore(path)
      else:
        yield path


def is_file(path: Path, left: LeftOut) -> bool:
  """Whether `path` is a file that can be read from its beginning to its end; otherwise it is left out."""
  if os.path.isfile(path):
    return True
  left.add("broken links" if path.is_symlink() else "pipes, sockets or devices", path)
  return False


def named(files: Iterable[Path], patterns: Sequence[str], left: LeftOut) -> Iterator[Path]:
  for file in files:
    if matches(file.name, patterns):
      yield file
    else:
      left.add_file(file.name, file)


def once(files: Iterable[Path], left: LeftOut) -> list[Path]:
  """The files, each under one name: its own name, else the first name in the order of the alphabet."""
  real_folder = functools.cache(os.path.realpath)

  def real(file: Path) -> str:
    return os.path.realpath(file) if file.is_symlink() else os.path.join(real_folder(file.parent), file.name)

  candidates = [(real(file), file) for file in set(files)]
  found: set[object] = set()
  kept = []
  for path, file in sorted(candidates, key=lambda pair: (pair[0] != os.path.abspath(pair[1]), pair[1])):
    identity: object = path
    with contextlib.suppress(OSError):  # its reader says why
      status = os.stat(file)
      if status.st_nlink > 1:  # hard links; else numbers of inodes are not to be trusted on every file system
        identity = status.st_dev, status.st_ino
    if identity in found:
      left.add("other names of files that are read", file)
    else:
      found.add(identity)
      kept.append(file)
  return kept
