"""Examples of local text: tokenized once into an ArrayRecord file of windows, then read by global index with grain."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.config import rules
from trainer.config.errors import ConfigError, require
from trainer.data import cache, corpus, store, windows
from trainer.data.batch import Example, empty_example
from trainer.data.tokenizer import ByteTokenizer, Tokenizer, load_bpe, train_bpe

if TYPE_CHECKING:
  from trainer.config.schema import DataSection  # pydantic is slow to import and not needed here

# Characters to train a tokenizer on. All 12 MB of the standard library would save 2 % of the tokens, but take long.
_SAMPLE = 3_000_000
_SAMPLE_OF_DOCUMENT = 100_000


class TextSource:
  """The windows of one split. Training: endless, reshuffled each epoch. Evaluation: one fixed order, then padding.

  The order comes from grain, whose `shuffle` computes a permutation per epoch, one index at a time.
  """

  def __init__(self, folder: Path, *, name: str, split: str, seed: int, tokenizer: Tokenizer) -> None:
    meta = json.loads((folder / store.META).read_text())
    self.name = name
    self.tokenizer: Tokenizer | None = tokenizer
    self.num_examples: int | None = meta["splits"][split]["windows"]
    self.num_targets: int | None = meta["splits"][split]["targets"]
    self.has_eval: bool = meta["splits"].get("eval", {"targets": 0})["targets"] > 0
    self._meta = meta
    self._split = split
    # A fixed seed for evaluation keeps runs comparable. Our seeds are any integers, and grain needs 32 bits.
    self._seed = int(hashlib.sha256(str(seed).encode()).hexdigest()[:8], 16) if split == "train" else 0
    self._records = _Records(folder / store.file_name(split), meta["splits"][split]["windows"])
    # Import here, not at first use in the prefetch thread: the main thread may be importing the same modules then.
    import grain

    ordered = grain.MapDataset.source(self._records).shuffle(seed=self._seed)
    self._ordered = ordered.repeat() if split == "train" else ordered

  def example(self, index: int) -> Example:
    """The window at `index` in the order of the split. Raises OSError, naming the file, when it cannot be read."""
    if self._split == "eval" and index >= len(self._records):
      return empty_example(self._meta["length"])
    return windows.example(windows.unpack(self._ordered[index], np.dtype(self._meta["dtype"])), self._meta["length"])

  def fingerprint(self) -> str:
    # The first records in order detect a version of grain that shuffles differently.
    probe = hashlib.sha256()
    for index in range(min(8, len(self._records))):
      probe.update(self._ordered[index])
    return f"text-{store.FORMAT} {self._meta['key']} split={self._split} seed={self._seed} first={probe.hexdigest()}"

  def unigram_entropy(self) -> float:
    return self._meta["unigram_entropy"]

  def unigram_eval_loss(self) -> float | None:
    return self._meta["unigram_eval_loss"]

  def close(self) -> None:
    self._records.close()


class _Records:
  """An ArrayRecord file as a random-access source for grain: length, and record by number. Thread safe.

  array_record's own source needs more time per record the more records the file has (6 ms at a million). A seek needs
  microseconds.
  """

  def __init__(self, path: Path, count: int) -> None:
    self._path = path
    self._count = count
    self._lock = threading.Lock()
    self._reader: Any = None

  def __len__(self) -> int:
    return self._count

  def __getitem__(self, number: int) -> bytes:
    with self._lock:
      try:
        if self._reader is None:
          self._reader = store.open_reader(self._path)
        self._reader.seek(number)
        return self._reader.read()
      except (RuntimeError, IndexError) as error:
        self._reader = None  # after one failure a reader also fails at undamaged records
        raise OSError(
          f"record {number} of {self._path} cannot be read: {error!r}. "
          "Delete the folder of this file; the text is then tokenized again."
        ) from error

  def close(self) -> None:
    with self._lock:
      if self._reader:
        self._reader.close()
      self._reader = None


def open_source(cfg: DataSection, *, vocab_size: int, min_examples: int, split: str, log: cache.Log) -> TextSource:
  """The source of a split. Tokenizes the text first if the cache does not have it.

  Raises ConfigError if the text is too short for `min_examples` windows, or for one token.
  """
  parts = find_parts(cfg)
  # Each target is at least a byte, or the end of a document. Refuse far too little text before anything is cached.
  _check_enough(cfg, split, min_examples, sum(piece.size + 1 for piece in parts.get(split, ())), "at most ")
  folder, tokenizer = tokenized(cfg, parts, vocab_size=vocab_size, log=log)
  known = json.loads((folder / store.META).read_text())["splits"].get(split, {"targets": 0})
  _check_enough(cfg, split, min_examples, known["targets"])
  name = _name(cfg, split)
  return TextSource(folder, name=name, split=split, seed=cfg.data_shuffle_seed, tokenizer=tokenizer)


def _check_enough(cfg: DataSection, split: str, min_examples: int, targets: int, bound: str = "") -> None:
  """Raises ConfigError if `targets` tokens to learn do not fill `min_examples` examples."""
  if targets >= max(1, min_examples * cfg.max_target_length):
    return
  remedy = f"Set eval_dataset_path, or eval_steps=0 eval_interval=-1 (eval_fraction={cfg.eval_fraction:g})."
  if split == "train":
    remedy = "Give more text, or reduce the batch size or max_target_length."
  found = f"{bound}{targets}" if targets else "0"
  raise ConfigError(
    f"The {split} text of {_name(cfg, split)} has {found} tokens to learn, but {max(1, min_examples)} examples of "
    f"max_target_length={cfg.max_target_length} are needed. {remedy}"
  )


def _name(cfg: DataSection, split: str) -> str:
  return cfg.eval_dataset_path * (split == "eval") or cfg.dataset_path or "the Python standard library"


def tokenized(
  cfg: DataSection, parts: dict[str, list[corpus.Piece]], *, vocab_size: int, log: cache.Log
) -> tuple[Path, Tokenizer]:
  """(folder with the windows of all splits, tokenizer), both from the cache or made now; see `store`.

  `parts` comes from `find_parts`. Raises ConfigError if the text cannot be read, or the tokenizer has more than
  `vocab_size` ids.
  """
  digests = {name: corpus.digest(pieces) for name, pieces in parts.items()}
  tokenizer = _tokenizer(cfg, vocab_size, parts["train"], digests["train"], log)
  if tokenizer.vocab_size > vocab_size:
    raise ConfigError(
      f"vocab_size={vocab_size} is smaller than the {tokenizer.name} tokenizer's {tokenizer.vocab_size} ids. "
      f"Set vocab_size to at least {tokenizer.vocab_size}."
    )
  length = cfg.max_target_length
  key = _hash(store.FORMAT, digests, tokenizer.fingerprint, length)
  build = partial(store.build, key=key, parts=parts, tokenizer=tokenizer, length=length, log=log)
  folder = cache.entry(cfg.dataset_cache_directory, f"corpus-{key[:32]}", build=build, fault=store.fault, log=log)
  return folder, tokenizer


def find_parts(cfg: DataSection) -> dict[str, list[corpus.Piece]]:
  """The pieces of text of each split. Without held-out text there is no key "eval"."""
  pieces = corpus.find("dataset_path", cfg.dataset_path)
  if cfg.eval_dataset_path:
    return {"train": pieces, "eval": corpus.find("eval_dataset_path", cfg.eval_dataset_path)}
  train, held_out = corpus.hold_out(pieces, cfg.eval_fraction)
  return {"train": train, "eval": held_out} if held_out else {"train": train}


def _tokenizer(
  cfg: DataSection, vocab_size: int, pieces: Sequence[corpus.Piece], digest: str, log: cache.Log
) -> Tokenizer:
  """The configured tokenizer. Trains a BPE on `pieces` if no file is given and the cache does not have it."""
  if cfg.tokenizer_type == "byte":
    require(rules.tokenizer(cfg))
    return ByteTokenizer()
  if cfg.tokenizer_path:
    return load_bpe(cfg.tokenizer_path)

  def build(folder: Path) -> None:
    log(f"Training a BPE tokenizer of {vocab_size} ids")
    (folder / "tokenizer.json").write_text(train_bpe(_sample(pieces), vocab_size), encoding="utf-8")

  def fault(folder: Path) -> str | None:
    try:
      load_bpe(str(folder / "tokenizer.json"))
    except ConfigError as error:
      return str(error)
    return None

  name = f"tokenizer-{_hash(store.FORMAT, digest, vocab_size, _SAMPLE)[:32]}"
  folder = cache.entry(cfg.dataset_cache_directory, name, build=build, fault=fault, log=log)
  return load_bpe(str(folder / "tokenizer.json"))


def _sample(pieces: Sequence[corpus.Piece]) -> Iterator[str]:
  """Yields beginnings of documents, about _SAMPLE characters in total, from files in the order of a hash."""
  left = _SAMPLE
  for piece in sorted(pieces, key=lambda piece: _hash(piece.name)):
    for document in corpus.documents(piece):
      yield document[: min(left, _SAMPLE_OF_DOCUMENT)]
      left -= min(len(document), _SAMPLE_OF_DOCUMENT)
      if left <= 0:
        return


def _hash(*parts: Any) -> str:
  return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
