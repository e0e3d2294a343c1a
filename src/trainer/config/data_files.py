"""The files that a key names with dataset_type=grain: one rule for the configuration check and for the data."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from trainer.config.errors import ConfigError, shorten
from trainer.config.files import as_path

# Names that are read in a folder, by the beginning of grain_file_type. TFDS adds -00000-of-00001 to its names.
_NAMES = {
  "arrayrecord": ("*.array_record", "*.array_record-*", "*.arrayrecord", "*.arrayrecord-*"),
  "parquet": ("*.parquet",),
  "jsonl": ("*.jsonl", "*.jsonl.gz", "*.jsonl.zst", "*.json", "*.json.gz", "*.json.zst"),
}


def find(key: str, value: str, file_type: str) -> tuple[Path, list[Path]]:
  """(folder that contains all files, the files) of files, folders and patterns separated by ';'. Sorted by name.

  Folders are searched with their subfolders, without hidden names. `file_type`: a value of grain_file_type. Raises
  ConfigError if a part has no file, or a file is empty or cannot be read.
  """
  found: set[Path] = set()
  names = _NAMES[file_type.partition("_")[0]]
  for part in map(str.strip, value.split(";")):
    if "://" in part:
      raise ConfigError(f"{key}={shorten(value)}: only local files can be read.\nMount the bucket as a folder.")
    if re.fullmatch(r".*[,:]\s*[\d.]+", part):
      raise ConfigError(
        f"{key}={shorten(value)}: {part!r} ends in a weight, as MaxText writes a mixture.\n"
        "Set grain_train_mixture_config_path to a file with the sources and their weights."
      )
    files = list(_files(as_path(part, f"{key}="), names)) if part else []
    if not files:
      raise ConfigError(
        f"{key}={shorten(value)}: {part!r} has no files with grain_file_type={file_type}.\nGive files, folders with "
        f"{', '.join(names)}, or patterns with * and ?, separated by ';'."
      )
    found.update(files)
  for path in found:
    if not os.access(path, os.R_OK):
      raise ConfigError(f"{key}={shorten(value)}: {path} cannot be read.\nAllow reading it, or name other files.")
    if path.stat().st_size == 0:
      raise ConfigError(f"{key}={shorten(value)}: {path} is an empty file.\nRemove it, or name other files.")
  files = sorted(found, key=lambda path: path.as_posix())
  return Path(os.path.commonpath([path.parent for path in files])), files


def _files(path: Path, names: tuple[str, ...]) -> Iterator[Path]:
  """Yields the files of one file, folder or pattern, as absolute paths."""
  path = Path(os.path.abspath(path))
  for match in [path] if path.exists() else map(Path, glob.glob(str(path), recursive=True)):
    if match.is_file():
      yield match
      continue
    for folder, subfolders, files in os.walk(match):
      subfolders[:] = [name for name in subfolders if not name.startswith(".")]
      for name in files:
        if not name.startswith(".") and any(fnmatch(name, wanted) for wanted in names):
          yield Path(folder, name)
