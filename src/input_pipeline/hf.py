"""Documents of a dataset that Hugging Face datasets has saved with save_to_disk. Needs pyarrow, and not datasets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from input_pipeline import arrow_column, packages, storage
from input_pipeline.documents import BadRecord, Document, Piece
from input_pipeline.input_errors import ConfigError

_SPLITS, _STATE = "dataset_dict.json", "state.json"


def find(path: str, split: str) -> list[Piece]:
  """The files of a split. A folder with a single dataset has the split that train_split names, whatever its name.

  Raises ConfigError if the folder has no saved dataset, not this split, or files with another order of rows.
  """
  folder = Path(path).expanduser()
  splits = _read(folder, _SPLITS)
  if splits is not None:
    names = splits.get("splits", [])
    if split not in names:
      raise ConfigError(
        f"dataset_path={path} has no split {split}. Set train_split and eval_split to some of {', '.join(names)}."
      )
    folder = folder / split
  state = _read(folder, _STATE)
  if state is None:
    raise ConfigError(
      f"dataset_path={path} has no dataset that datasets has saved with save_to_disk ({folder / _STATE} is absent). "
      "Give such a folder, or the files themselves with dataset_type=grain."
    )
  if state.get("_indices_data_files"):
    raise ConfigError(f"dataset_path={path} has an order of rows of its own. Save it again after flatten_indices().")
  try:
    paths = [folder / entry["filename"] for entry in state["_data_files"]]
    return [Piece(path.name, path, 0, path.stat().st_size) for path in paths]
  except (KeyError, TypeError) as error:
    raise ConfigError(f"{folder / _STATE} does not name the files of the dataset. Save it again.") from error
  except OSError as error:
    storage.raise_outage("read", folder, error)
    raise ConfigError(f"dataset_path={path}: {error}. Save the dataset again.") from error


def has_splits(path: str) -> bool:
  """Whether the folder has several splits, and not a single dataset."""
  return _read(Path(path).expanduser(), _SPLITS) is not None


def read(piece: Piece, column: str) -> Iterator[Document | BadRecord]:
  """Yields the values of `column`: texts, or lists of token ids. Skips nulls.

  Lists with nulls are bad records. Raises ConfigError if the file cannot be read, or has rows but no such column of
  strings or lists of integers.
  """
  arrow = packages.load("pyarrow", package="pyarrow", extra="arrow", reason="dataset_type=hf")
  ipc = packages.load("pyarrow.ipc", package="pyarrow", extra="arrow", reason="dataset_type=hf")
  number = 0
  try:
    with arrow.memory_map(str(piece.path)) as file, ipc.open_stream(file) as reader:
      for number, batch in enumerate(reader):
        if len(batch):
          names = arrow_column.find(reader.schema, piece, column)
          yield from arrow_column.documents(batch, names, f"record batch {number} of {piece.path}")
  except (OSError, UnicodeDecodeError, arrow.ArrowException) as error:
    storage.raise_outage("read", piece.path, error)
    raise ConfigError(
      f"{piece.path} cannot be read after record batch {number} ({error}). Save the dataset again."
    ) from error


def _read(folder: Path, name: str) -> dict[str, Any] | None:
  """The JSON of a file; None if it is absent."""
  try:
    content = json.loads((folder / name).read_text())
    if not isinstance(content, dict):
      raise ValueError("it is not a mapping")
    return content
  except FileNotFoundError:
    return None
  except (OSError, ValueError) as error:
    storage.raise_outage("read", folder / name, error)
    raise ConfigError(f"{folder / name} cannot be read ({error}). Save the dataset again.") from error
