"""The text files of a folder: one rule for the configuration check and for the data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trainer.config import folders, remote
from trainer.config.folders import LeftOut

SUFFIXES = (".txt", ".md", ".py", ".jsonl")
_NAMES = [f"*{suffix}" for suffix in SUFFIXES]


def below(root: Path, left: LeftOut, skip: frozenset[str] = frozenset()) -> Iterator[Path]:
  """Yields the text files below the folder `root`, also empty files. Raises ConfigError as `folders.below`."""
  return folders.named(folders.below(root, left, skip), _NAMES, left)


def at_address(key: str, address: str, left: LeftOut) -> list[remote.RemoteFile]:
  """The text files that are not empty at the address of a file or a folder. ConfigError as for `remote.find`."""
  found = remote.find(key, address, _NAMES, left)
  return [file for file in found if file.size and file.suffix.lower() in SUFFIXES]
