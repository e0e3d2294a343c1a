"""Documents of a dataset that TensorFlow Datasets has prepared in the format array_record. Imports no TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from input_pipeline import packages, record
from input_pipeline.documents import BadRecord, Document, Piece
from input_pipeline.input_errors import ConfigError

_PACKAGE = {"package": "tensorflow-datasets", "extra": "tfds", "reason": "dataset_type=tfds"}
_UNREADABLE = (RuntimeError, IndexError, OSError)
_READ_AT_ONCE = 256  # records; one call for each record is slow


def find(folder: str, split: str) -> list[Piece]:
  """The shards of a split. Raises ConfigError if the folder has no prepared dataset, or not this split."""
  builder = _builder(folder)
  if builder.info.file_format.value != "array_record":
    raise ConfigError(
      f"dataset_path={folder} has the format {builder.info.file_format.value}, and only array_record can be read. "
      f"Where TensorFlow is installed, run: tfds convert_format --dataset_version_dir={folder} "
      "--out_file_format=array_record --out_dir=NEW_FOLDER."
    )
  if split not in builder.info.splits:
    splits = ", ".join(builder.info.splits)
    raise ConfigError(
      f"dataset_path={folder} has no split {split}. Set train_split and eval_split to some of {splits}."
    )
  paths = [Path(path) for path in builder.info.splits[split].filepaths]
  try:
    return [Piece(path.name, path, 0, path.stat().st_size) for path in paths]
  except OSError as error:
    raise ConfigError(f"dataset_path={folder}: {error}. Prepare the dataset again.") from error


def read(piece: Piece, folder: str, split: str, column: str) -> Iterator[Document | BadRecord]:
  """Yields the feature `column` of each example of a shard: a text, or token ids.

  An example that cannot be read is a bad record. Raises ConfigError if the dataset has no such feature with texts or
  integers, or the shard cannot be opened.
  """
  builder = _builder(folder)
  features = builder.info.features
  if column not in features:
    raise ConfigError(
      f"train_data_columns={column}: {folder} has no such feature. Choose one of {', '.join(sorted(features))}."
    )
  shard = [Path(path).name for path in builder.info.splits[split].filepaths].index(piece.name)
  open_shard = lambda: builder.as_data_source(f"{split}[{shard}shard:{shard + 1}shard]")
  try:
    source = open_shard()
    examples = len(source)
  except (RuntimeError, OSError) as error:
    raise ConfigError(f"{piece.path} cannot be read ({error}). Prepare the dataset again.") from error
  for start in range(0, examples, _READ_AT_ONCE):
    numbers = range(start, min(start + _READ_AT_ONCE, examples))
    try:
      found = [record.of_fields(example, column) for example in source.__getitems__(numbers)]
    except (ValueError, *_UNREADABLE):
      yield from (_one(open_shard, number, piece, column) for number in numbers)
    else:
      yield from found


def _one(open_source: Callable[[], Any], number: int, piece: Piece, column: str) -> Document | BadRecord:
  """The document of example `number` of a shard. `open_source`: a reader that failed once is useless."""
  try:
    return record.of_fields(open_source()[number], column)
  except ValueError as error:
    return BadRecord(f"record {number} of {piece.path}: {error}.")
  except _UNREADABLE as error:
    return BadRecord(f"record {number} of {piece.path} cannot be read ({error}). Prepare the dataset again.")


def _builder(folder: str) -> Any:
  tfds = packages.load("tensorflow_datasets", **_PACKAGE)
  try:
    return tfds.builder_from_directory(str(Path(folder).expanduser()))
  except Exception as error:
    raise ConfigError(
      f"dataset_path={folder} has no dataset that tensorflow-datasets has prepared ({error}). "
      "Give the folder with dataset_info.json."
    ) from error
