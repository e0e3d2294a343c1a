"""The files that a key names: one rule for the configuration check and for the data."""

from __future__ import annotations

import glob
import os
import posixpath
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple, TypeAlias, TypeVar

from input_pipeline import folders, remote, storage
from input_pipeline.folders import LeftOut
from input_pipeline.input_errors import ConfigError, shorten

File: TypeAlias = Path | remote.RemoteFile
X = TypeVar("X", bound=File)

# Names that are read in a folder, by the beginning of grain_file_type. TFDS adds -00000-of-00001 to its names.
_NAMES = {
  "arrayrecord": ("*.array_record", "*.array_record-*", "*.arrayrecord", "*.arrayrecord-*"),
  "parquet": ("*.parquet",),
  "jsonl": ("*.jsonl", "*.jsonl.gz", "*.jsonl.zst", "*.json", "*.json.gz", "*.json.zst"),
}

TEXT_SUFFIXES = (".txt", ".md", ".py", ".jsonl")
_TEXT_NAMES = [f"*{suffix}" for suffix in TEXT_SUFFIXES]


class Found(NamedTuple):
  name: str  # relative to the folder that contains all files, with '/'
  file: File
  size: int  # bytes


def find(key: str, value: str, file_type: str, left: LeftOut | None = None) -> list[Found]:
  """With dataset_type=grain: what files, folders, patterns and addresses name, separated by ';'. Sorted by name.

  Folders are searched as `folders.below` says. `file_type`: a value of grain_file_type. left: gets what is not read.
  Raises ConfigError if a part has no file, or a file is of another type, empty (except JSONL) or cannot be read.
  """
  left = left or LeftOut()
  found: set[File] = set()
  names = _NAMES[file_type.partition("_")[0]]
  for part in _parts(value):
    files = list(_files(key, part, names, file_type, left)) if part else []
    if not files and re.fullmatch(r".*[,:]\s*[\d.]+", part):
      raise ConfigError(
        f"{key}={shorten(value)}: there is no {part!r}. It ends in a weight, as MaxText writes a mixture.\n"
        "Set grain_train_mixture_config_path to a file with the sources and their weights."
      )
    if not files:
      remote.require_address(f"{key}={shorten(part)}", part, None)
      raise ConfigError(
        f"{key}={shorten(value)}: {part!r} has no files with grain_file_type={file_type}{left.note}.\n"
        f"Give files, folders with {', '.join(names)}, or patterns with * and ?, separated by ';'"
        f"{', in which brackets stand for themselves' * ('[' in part)}, or set grain_file_type."
      )
    found.update(files)
  if len({isinstance(file, Path) for file in found}) > 1:
    raise ConfigError(
      f"{key}={shorten(value)}: some files are local and some are not.\nGive a mixture with two sources, or files of "
      "one place."
    )
  local = [file for file in found if isinstance(file, Path)]
  return _named(key, value, folders.once(local, left) if local else found, file_type, left)


def _parts(value: str) -> list[str]:
  """The files, folders and patterns of a key. A file or folder may have ';' in its name: one that exists is meant."""
  return [value] if os.path.exists(os.path.expanduser(value)) else [part.strip() for part in value.split(";")]


def _named(key: str, value: str, files: Collection[File], file_type: str, left: LeftOut) -> list[Found]:
  """The files with their names and sizes. Raises ConfigError for a file that is of another type or cannot be read."""
  found, ours = [], file_type.partition("_")[0]
  for name, file in relative_names(files):
    kinds = [kind for kind, names in _NAMES.items() if folders.matches(file.name, names)]
    if kinds and ours not in kinds:
      raise ConfigError(
        f"{key}={shorten(value)}: {file} is a file of another type than grain_file_type={file_type}.\n"
        f"Set grain_file_type={kinds[0]}, or name other files."
      )
    if isinstance(file, Path) and not os.access(file, os.R_OK):
      raise ConfigError(f"{key}={shorten(value)}: {file} cannot be read.\nAllow reading it, or name other files.")
    size = file.stat().st_size if isinstance(file, Path) else file.size
    if size == 0 and ours == "jsonl" and len(files) > 1:  # a part of a dataset without lines
      left.add("empty files", file)
    elif size == 0:
      raise ConfigError(f"{key}={shorten(value)}: {file} is an empty file.\nRemove it, or name other files.")
    else:
      found.append(Found(name, file, size))
  return found


def relative_names(files: Collection[X]) -> list[tuple[str, X]]:
  """The files with their names relative to the folder that contains all of them, sorted by these names."""
  places = {str(file).rpartition("://")[2]: file for file in files}
  root = posixpath.commonpath([posixpath.dirname(place) for place in places]) if places else ""
  return [(place.removeprefix(root).lstrip("/"), places[place]) for place in sorted(places)]


def _files(key: str, part: str, names: tuple[str, ...], file_type: str, left: LeftOut) -> Iterator[File]:
  if not storage.is_address(part):
    yield from _local(folders.as_path(part, f"{key}="), names, left)
  elif file_type in ("parquet", "jsonl"):
    yield from remote.find(key, part, names, left)
  else:
    raise ConfigError(
      f"{key}={shorten(part)}: the reader of ArrayRecord opens only files of this machine.\n"
      "Mount the bucket as a folder (gcsfuse), copy the files, or give files of Parquet or JSONL."
    )


def _local(path: Path, names: tuple[str, ...], left: LeftOut) -> Iterator[Path]:
  """Yields the local files of one file, folder or pattern, as absolute paths."""
  path = Path(os.path.abspath(path))
  exists = os.path.exists(path)  # unlike Path.exists, False in a folder without permission to search
  if not exists and "**" in path.parts:
    yield from _deep(path, names, left)
    return
  for match in [path] if exists else _matches(path, left):
    if os.path.isdir(match):
      yield from folders.named(folders.below(match, left), names, left)
    elif folders.is_file(match, left):
      yield match


def _matches(pattern: Path, left: LeftOut) -> Iterator[Path]:
  """Yields the files and folders that match a pattern without `**`."""
  for match in sorted(map(Path, glob.glob(folders.literal(str(pattern))))):
    if folders.is_set_aside(match.parts, pattern.parts):
      left.add_underscore(match)
    else:
      yield match


def _deep(pattern: Path, names: tuple[str, ...], left: LeftOut) -> Iterator[Path]:
  """Yields the files of a pattern with `**`: glob would follow links in circles."""
  place = pattern.parts.index("**")
  tail = "/".join(pattern.parts[place + 1 :]) or "*"
  if "**" in tail:
    raise ConfigError(f"{pattern}: has ** several times.\nWrite one ** and separate several patterns by ';'.")
  matched = folders.literal(tail)
  for root in _matches(Path(*pattern.parts[:place]), left):
    for file in folders.below(root, left, given=tail.split("/")) if os.path.isdir(root) else ():
      below = file.relative_to(root)
      if below.match(matched) or (
        folders.matches(file.name, names) and any(folder.match(matched) for folder in below.parents)
      ):
        yield file


def text_below(root: Path, left: LeftOut, skip: frozenset[str] = frozenset()) -> Iterator[Path]:
  """Yields the text files below the folder `root`, also empty files. Raises ConfigError as `folders.below`."""
  return folders.named(folders.below(root, left, skip), _TEXT_NAMES, left)


def text_at_address(key: str, address: str, left: LeftOut) -> list[remote.RemoteFile]:
  """The text files that are not empty at the address of a file or a folder. ConfigError as for `remote.find`."""
  found = remote.find(key, address, _TEXT_NAMES, left)
  return [file for file in found if file.size and file.suffix.lower() in TEXT_SUFFIXES]
