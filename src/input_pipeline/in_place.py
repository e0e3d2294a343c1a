"""Examples that are records of ArrayRecord files, one each: token ids or windows, read in place without a copy."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from input_pipeline import array_record, cache, contents, prepare, prepared, windows, workers
from input_pipeline.batch import Example, empty_example
from input_pipeline.documents import BadRecord, BadRecords, Documents, Piece
from input_pipeline.input_errors import ConfigError
from input_pipeline.order import Order, identity
from input_pipeline.progress import tell
from input_pipeline.source import Source

if TYPE_CHECKING:
  from input_pipeline.options import DataOptions  # pydantic is slow to import and not needed here

_WINDOWS = "arrayrecord_windows"
DTYPE = np.dtype("<i4")  # of the tokens in a record of a window


class _Windows:
  """The records as windows, packed by `windows.pack`. Implements order.Records."""

  def __init__(
    self, records: array_record.Records, file_type: str, length: int, vocab_size: int, bad: Sequence[int] = ()
  ) -> None:
    """`bad`: numbers of records that are skipped, ascending."""
    self._records = records
    self._good_before = np.array(bad, np.int64) - np.arange(len(bad))  # of each bad record, the good ones before it
    self._decode = self._window if file_type == _WINDOWS else self._tokens(file_type)
    self._length = length
    self._vocab_size = vocab_size

  def __len__(self) -> int:
    return len(self._records) - len(self._good_before)

  def __getitem__(self, number: int) -> bytes:
    """The window of a record. Raises OSError, naming record and file, if it is not a window of tokens below V."""
    number += int(np.searchsorted(self._good_before, number, side="right"))
    record = self._records[number]
    try:
      return windows.pack(self.decode(record), DTYPE)
    except ValueError as error:
      raise OSError(f"{self._records.place(number)}: {error}") from error

  def decode(self, record: bytes) -> windows.Window:
    """The window of a record. Raises ValueError if it is not a window of tokens below V."""
    window = self._decode(record)
    if not len(window.tokens):
      raise ValueError("it has no tokens. Remove empty records")
    if self._decode != self._window:
      return window._replace(tokens=prepare.checked(window.tokens, self._vocab_size))
    prepare.checked(windows.ids(window), self._vocab_size)
    return window

  def close(self) -> None:
    self._records.close()

  def _tokens(self, file_type: str) -> Callable[[bytes], windows.Window]:
    """The function that makes a window of the first T + 1 tokens of a record."""
    decode = array_record.decoder(file_type, "")
    return lambda record: windows.Window(np.asarray(decode(record))[: self._length + 1], np.zeros(0, np.int64))

  def _window(self, record: bytes) -> windows.Window:
    """The window of a record of trainer.tools.tokenize. Raises ValueError if it is damaged or longer than T + 1."""
    window = windows.unpack(record, DTYPE)
    if len(window.tokens) > self._length + 1:
      raise ValueError(
        f"it has {len(window.tokens)} tokens, and an example has max_target_length + 1 = {self._length + 1}. Set "
        f"max_target_length={len(window.tokens) - 1}, or make windows of this length with trainer.tools.tokenize"
      )
    if ((window.starts < 1) | (window.starts >= max(2, len(window.tokens)))).any():
      raise ValueError("it is not a window: the beginnings of its documents lie outside")
    return window


class InPlaceSource(Source):
  """An example is a window, or the first T + 1 tokens of a record, and padding."""

  def __init__(
    self, cfg: DataOptions, examples: _Windows, *, name: str, split: str, key: str, bad_records: int
  ) -> None:
    """`key`: identity of the examples. Raises ConfigError if the first record is not an example."""
    self.name = name
    self.bad_records = bad_records
    self.num_examples = len(examples)
    self.has_eval = cfg.names_eval_data
    self._length = cfg.max_target_length
    self._examples = examples
    try:
      first = windows.unpack(examples[0], DTYPE)
    except OSError as error:
      raise ConfigError(str(error)) from error
    source = identity(len(examples), first)
    self.order = Order(examples, split=split, seed=cfg.data_shuffle_seed, source=source)
    self._key = key

  def example(self, index: int) -> Example:
    """The record at `index` in the order of the split. Raises OSError, naming record and file, if it has no tokens."""
    record = self.order.record(index)
    if record is None:
      return empty_example(self._length)
    return windows.example(windows.unpack(record, DTYPE), self._length)

  def fingerprint(self) -> str:
    return f"{self._key} {self.order.fingerprint}"

  def close(self) -> None:
    self._examples.close()


def applies(cfg: DataOptions) -> bool:
  """Whether each record of the files is an example, so that nothing has to be prepared."""
  whole = ("arrayrecord_uint16", "arrayrecord_int32") if cfg.packing == "none" else ()
  return cfg.dataset_type == "grain" and cfg.grain_file_type in (_WINDOWS, *whole)


def open_source(
  cfg: DataOptions,
  documents: Documents | None,
  *,
  vocab_size: int,
  min_examples: int,
  split: str,
  log: cache.Log,
  call: workers.Call,
) -> InPlaceSource:
  """The source of the documents of a split. The cache keeps the number of records of each file, which `call` counts.

  Raises ConfigError if there are fewer than `min_examples` records, or no files for the split.
  """
  if documents is None:
    raise ConfigError("There are no evaluation data. Set grain_eval_files, or eval_steps=0 eval_interval=-1.")
  read = lambda: contents.hash_of(documents.format, contents.of_files(documents.pieces))
  digest = contents.Stamps([documents]).remembered(cfg.dataset_cache_directory, "files", read, log)
  length = cfg.max_target_length
  key = f"in-place-2 {digest} length={length} vocab={vocab_size}"
  counts, found = _records(cfg, documents, key if cfg.max_bad_records else digest, vocab_size, log, call)
  if sum(counts) < max(1, min_examples):
    raise ConfigError(
      f"{documents.name} has {sum(counts)} records, but {max(1, min_examples)} examples are needed. "
      "Give more files, or reduce the batch size."
    )
  records = array_record.Records([piece.path for piece in documents.pieces], counts)
  if found:
    prepared.require_few(len(found), list(found.values()), cfg.max_bad_records, documents.name, log)
    key += f" bad={sorted(found)}"
  examples = _Windows(records, cfg.grain_file_type, length, vocab_size, sorted(found))
  return InPlaceSource(cfg, examples, name=documents.name, split=split, key=key, bad_records=len(found))


def _records(
  cfg: DataOptions, documents: Documents, key: str, vocab_size: int, log: cache.Log, call: workers.Call
) -> tuple[list[int], dict[int, str]]:
  """(number of records of each file, {number: message} of the records that are not examples), from the cache or from
  the files. Only with max_bad_records, all records are read. key: what the result depends on."""

  def read() -> tuple[list[int], dict[int, str]]:
    counts = call(partial(_counts, documents.pieces), f"it counted the records of {documents.name}")
    bad: dict[int, str] = {}
    if cfg.max_bad_records:
      tell(f"Looking for bad records in {sum(counts):,} records of {documents.name}")
      sizes, most = (cfg.max_target_length, vocab_size), BadRecords(cfg.max_bad_records, tell)
      work = partial(_read_all, documents.pieces, counts, cfg.grain_file_type, *sizes, most)
      bad = call(work, f"it read {documents.name}")
    return counts, bad

  name = f"records-{hashlib.sha256(key.encode()).hexdigest()[:32]}"
  counts, bad = cache.value(cfg.dataset_cache_directory, name, "records.json", compute=read, log=log)
  return counts, {int(number): message for number, message in bad.items()}


def _counts(pieces: Sequence[Piece]) -> list[int]:
  """The number of records of each file."""
  return [array_record.count(piece) for piece in pieces]


def _read_all(
  pieces: Sequence[Piece], counts: Sequence[int], file_type: str, length: int, vocab_size: int, bad: BadRecords
) -> dict[int, str]:
  """{number: message} of the records that are not examples. Raises ConfigError if they are too many."""
  records = array_record.Records([piece.path for piece in pieces], counts)
  decode = _Windows(records, file_type, length, vocab_size).decode
  found: dict[int, str] = {}
  for start, piece in zip(itertools.accumulate(counts, initial=0), pieces):
    for number, record in enumerate(array_record.scan(piece, decode), start):
      if isinstance(record, BadRecord):
        bad.add(record)
        found[number] = record.message
  return found
