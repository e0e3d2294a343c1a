"""Which files a folder of text holds: what the configuration checks at the start is what the data is made of."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path

SUFFIXES = (".txt", ".md", ".py", ".jsonl")


def below(root: Path, skip: frozenset[str] = frozenset()) -> Iterator[Path]:
  """The text files below the folder `root`, empty ones too; hidden ones and folders named in `skip` are left out.

  Links to folders are followed, as folders of data sets are often made of them, but each folder is looked at once
  however many links lead to it, and under its own name where it lies below root itself. A link to nothing is no file.
  Raises ValueError, naming the folder, where one cannot be listed.
  """
  seen: set[tuple[int, int]] = set()
  folders, links = deque([root]), deque[Path]()
  while folders or links:
    folder = folders.popleft() if folders else links.popleft()
    try:
      status = folder.stat()
      names = sorted(os.listdir(folder))
    except OSError as error:
      raise ValueError(f"{folder} cannot be listed ({error.strerror}): allow it, or take it away") from error
    if (status.st_dev, status.st_ino) in seen:
      continue
    seen.add((status.st_dev, status.st_ino))
    for path in (folder / name for name in names if not name.startswith(".")):
      if os.path.isdir(path):
        if path.name not in skip:
          (links if path.is_symlink() else folders).append(path)
      elif path.suffix in SUFFIXES and os.path.isfile(path):
        yield path
