"""Examples that are records of ArrayRecord files of token ids, one each: read where they are, without a copy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trainer.config.errors import ConfigError
from trainer.data import array_record, cache, datasets, prepare, windows
from trainer.data.batch import Example, empty_example
from trainer.data.order import Order
from trainer.data.tokenizer import Tokenizer

if TYPE_CHECKING:
  from trainer.config.schema import DataSection  # pydantic is slow to import and not needed here

_COUNTS = "counts.json"


class _Tokens:
  """The records of token ids as int32 arrays. Implements order.Records."""

  def __init__(self, records: array_record.Records, file_type: str, length: int, vocab_size: int) -> None:
    self._records = records
    self._decode = array_record.decoder(file_type, "")
    self._length = length
    self._vocab_size = vocab_size

  def __len__(self) -> int:
    return len(self._records)

  def __getitem__(self, number: int) -> np.ndarray:
    """The first T + 1 tokens of a record. Raises OSError, naming record and file, if they are not tokens below V."""
    record = self._records[number]
    try:
      tokens = np.asarray(self._decode(record))[: self._length + 1]
      if not len(tokens):
        raise ValueError("it has no tokens. Remove empty records")
      return prepare.checked(tokens, self._vocab_size)
    except ValueError as error:
      raise OSError(f"{self._records.place(number)}: {error}") from error


class InPlaceSource:
  """Implements `Source`. An example is the first T + 1 tokens of a record, and padding."""

  num_targets: int | None = None  # unknown without reading all records
  tokenizer: Tokenizer | None = None

  def __init__(
    self, cfg: DataSection, records: array_record.Records, *, name: str, split: str, digest: str, vocab_size: int
  ) -> None:
    """`digest`: identity of the records."""
    self.name = name
    self.num_examples: int | None = len(records)
    self.has_eval = cfg.names_eval_data
    self._length = cfg.max_target_length
    self._records = records
    tokens = _Tokens(records, cfg.grain_file_type, self._length, vocab_size)
    self._order = Order(tokens, split=split, seed=cfg.data_shuffle_seed)
    self._key = f"in-place-1 {digest} length={self._length} vocab={vocab_size}"

  def example(self, index: int) -> Example:
    """The record at `index` in the order of the split. Raises OSError, naming record and file, if it has no tokens."""
    tokens = self._order.record(index)
    if tokens is None:
      return empty_example(self._length)
    return windows.example(windows.Window(tokens, np.zeros(0, np.int64)), self._length)

  def fingerprint(self) -> str:
    return f"{self._key} {self._order.fingerprint}"

  def unigram_entropy(self) -> None:
    return None

  def unigram_eval_loss(self) -> None:
    return None

  def close(self) -> None:
    self._records.close()


def applies(cfg: DataSection) -> bool:
  """Whether each record of the files is an example, so that nothing has to be prepared."""
  is_tokens = cfg.grain_file_type in ("arrayrecord_uint16", "arrayrecord_int32")
  return cfg.dataset_type == "grain" and cfg.packing == "none" and is_tokens


def open_source(cfg: DataSection, *, vocab_size: int, min_examples: int, split: str, log: cache.Log) -> InPlaceSource:
  """The source of a split. The cache keeps the number of records of each file.

  Raises ConfigError if there are fewer than `min_examples` records, or no files for the split.
  """
  documents = datasets.find(cfg).get(split)
  if documents is None:
    raise ConfigError("There are no evaluation data. Set grain_eval_files, or eval_steps=0 eval_interval=-1.")
  digest = documents.digest()

  def build(folder: Path) -> None:
    (folder / _COUNTS).write_text(json.dumps([array_record.count(piece) for piece in documents.pieces]))

  def fault(folder: Path) -> str | None:
    return None if (folder / _COUNTS).is_file() else f"{_COUNTS} is absent"

  folder = cache.entry(cfg.dataset_cache_directory, f"counts-{digest[:32]}", build=build, fault=fault, log=log)
  counts = json.loads((folder / _COUNTS).read_text())
  if sum(counts) < max(1, min_examples):
    raise ConfigError(
      f"{documents.name} has {sum(counts)} records, but {max(1, min_examples)} examples are needed. "
      "Give more files, or reduce the batch size."
    )
  records = array_record.Records([piece.path for piece in documents.pieces], counts)
  return InPlaceSource(cfg, records, name=documents.name, split=split, digest=digest, vocab_size=vocab_size)
