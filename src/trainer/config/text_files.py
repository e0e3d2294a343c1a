"""The text files of a folder: one rule for the configuration check and for the data."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from trainer.config import remote
from trainer.config.errors import ConfigError

SUFFIXES = (".txt", ".md", ".py", ".jsonl")


def below(root: Path, skip: frozenset[str] = frozenset()) -> Iterator[Path]:
  """Yields the text files below the folder `root`, also empty files. Skips hidden names and folders named in `skip`.

  Follows links to folders, because folders of datasets often contain links, but visits each folder once: under its own
  name if it is below `root`, else under the first link to it. Skips broken links. Raises ConfigError with the folder's
  name if a folder cannot be listed.
  """
  seen: set[tuple[int, int]] = set()
  folders, links = deque([root]), deque[Path]()
  while folders or links:
    folder = folders.popleft() if folders else links.popleft()
    try:
      status = folder.stat()
      names = sorted(os.listdir(folder))
    except OSError as error:
      remedy = "Allow reading it, or remove the folder."
      raise ConfigError(f"{folder} cannot be listed ({error.strerror}). {remedy}") from error
    if (status.st_dev, status.st_ino) in seen:
      continue
    seen.add((status.st_dev, status.st_ino))
    for path in (folder / name for name in names if not name.startswith(".")):
      if os.path.isdir(path):
        if path.name not in skip:
          (links if path.is_symlink() else folders).append(path)
      elif path.suffix in SUFFIXES and os.path.isfile(path):
        yield path


def at_address(key: str, address: str) -> list[remote.RemoteFile]:
  """The text files that are not empty at the address of a file or a folder. ConfigError as for `remote.find`."""
  found = remote.find(key, address, [f"*{suffix}" for suffix in SUFFIXES])
  return [file for file in found if file.size and file.suffix in SUFFIXES]
