"""Examples of local text: tokenised once into an ArrayRecord file of windows, read by global index through grain."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.data import cache, corpus, store, windows
from trainer.data.batch import Example, empty_example
from trainer.data.tokenizer import ByteTokenizer, Tokenizer, load_bpe, train_bpe

if TYPE_CHECKING:
  from trainer.config.schema import DataSection  # pydantic is slow to import and not needed here

# Characters: more learns hardly better merges (2 % fewer tokens from all 12 MB of the standard library) but takes long.
_SAMPLE = 3_000_000
_SAMPLE_OF_DOCUMENT = 100_000


class TextSource:
  """The windows of one split. Training: shuffled anew each epoch, endless. Evaluation: one fixed order, then padding.

  The order is grain's: `shuffle` gives each epoch its own permutation, computed for one index at a time.
  """

  def __init__(self, folder: Path, *, split: str, seed: int, tokenizer: Tokenizer) -> None:
    meta = json.loads((folder / store.META).read_text())
    self.tokenizer: Tokenizer | None = tokenizer
    self.num_examples: int | None = meta["splits"][split]["windows"]
    self.has_eval: bool = meta["splits"].get("eval", {"targets": 0})["targets"] > 0
    self._meta = meta
    self._split = split
    # Evaluations of runs with different seeds stay comparable. Any integer is a seed here; grain takes 32 bits.
    self._seed = int(hashlib.sha256(str(seed).encode()).hexdigest()[:8], 16) if split == "train" else 0
    self._records = _Records(folder / store.file_name(split), meta["splits"][split]["windows"])
    # Not at the first use: that is in the prefetch thread, while this one may be importing what grain imports.
    import grain

    ordered = grain.MapDataset.source(self._records).shuffle(seed=self._seed)
    self._ordered = ordered.repeat() if split == "train" else ordered

  def example(self, index: int) -> Example:
    """The window at `index` in the order of the split. Raises OSError, naming the file, when it cannot be read."""
    if self._split == "eval" and index >= len(self._records):
      return empty_example(self._meta["length"])
    return windows.example(windows.unpack(self._ordered[index], np.dtype(self._meta["dtype"])), self._meta["length"])

  def fingerprint(self) -> str:
    # The first records in their order: another version of the library that shuffles otherwise must not go unnoticed.
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
  """An ArrayRecord file as what grain calls a random access source: length and record by number. Thread safe.

  The library's own source reads one record in a time that grows with the number of records in the file (6 ms at a
  million); seeking takes microseconds.
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
        self._reader = None  # a reader that failed once fails for good, also at sound records
        raise OSError(
          f"record {number} of {self._path} cannot be read: {error}; "
          "delete the folder that it is in, and the text will be tokenised again"
        ) from error

  def close(self) -> None:
    with self._lock:
      if self._reader:
        self._reader.close()
      self._reader = None


def open_source(cfg: DataSection, *, vocab_size: int, min_examples: int, split: str, log: cache.Log) -> TextSource:
  """The source of a split, tokenised first where the cache has it not.

  `min_examples` is how many windows the text must be able to fill; without any text it never serves. Raises ValueError
  when it cannot serve.
  """
  parts = find_parts(cfg)
  # A token to learn takes a byte, or is the end of a text: what is far too little is refused before anything is cached.
  _check_enough(cfg, split, min_examples, sum(piece.size + 1 for piece in parts.get(split, ())), "at most ")
  folder, tokenizer = tokenised(cfg, parts, vocab_size=vocab_size, log=log)
  known = json.loads((folder / store.META).read_text())["splits"].get(split, {"targets": 0})
  _check_enough(cfg, split, min_examples, known["targets"])
  return TextSource(folder, split=split, seed=cfg.data_shuffle_seed, tokenizer=tokenizer)


def _check_enough(cfg: DataSection, split: str, min_examples: int, targets: int, bound: str = "") -> None:
  """ValueError where so many tokens to learn do not fill so many examples."""
  if targets >= max(1, min_examples * cfg.max_target_length):
    return
  path = cfg.eval_dataset_path * (split == "eval") or cfg.dataset_path or "the standard library"
  remedy = f"give eval_dataset_path, or eval_steps=0 eval_interval=-1 (eval_fraction={cfg.eval_fraction:g})"
  if split == "train":
    remedy = "give more text, or make the batch or the length smaller"
  found = f"{bound}{targets}" if targets else "0"
  raise ValueError(
    f"the {split} text of {path} has {found} tokens to learn, and {max(1, min_examples)} examples of "
    f"max_target_length={cfg.max_target_length} are needed: {remedy}"
  )


def tokenised(
  cfg: DataSection, parts: dict[str, list[corpus.Piece]], *, vocab_size: int, log: cache.Log
) -> tuple[Path, Tokenizer]:
  """The folder with the windows of all splits (see `store`), from the cache or made now, and what tokenised them.

  `parts` is what `find_parts` gave. Raises ValueError when the text cannot be read, or the tokenizer has more than
  `vocab_size` ids.
  """
  digests = {name: corpus.digest(pieces) for name, pieces in parts.items()}
  tokenizer = _tokenizer(cfg, vocab_size, parts["train"], digests["train"], log)
  if tokenizer.vocab_size > vocab_size:
    raise ValueError(
      f"vocab_size={vocab_size} is smaller than the {tokenizer.name} tokenizer's {tokenizer.vocab_size} ids: "
      f"set vocab_size to at least {tokenizer.vocab_size}"
    )
  length = cfg.max_target_length
  key = _hash(store.FORMAT, digests, tokenizer.fingerprint, length)
  build = partial(store.build, key=key, parts=parts, tokenizer=tokenizer, length=length, log=log)
  folder = cache.entry(cfg.dataset_cache_directory, f"corpus-{key[:32]}", build=build, fault=store.fault, log=log)
  return folder, tokenizer


def find_parts(cfg: DataSection) -> dict[str, list[corpus.Piece]]:
  """The pieces of text of each split that has any."""
  pieces = corpus.find("dataset_path", cfg.dataset_path)
  if cfg.eval_dataset_path:
    return {"train": pieces, "eval": corpus.find("eval_dataset_path", cfg.eval_dataset_path)}
  train, held_out = corpus.hold_out(pieces, cfg.eval_fraction)
  return {"train": train, "eval": held_out} if held_out else {"train": train}


def _tokenizer(
  cfg: DataSection, vocab_size: int, pieces: Sequence[corpus.Piece], digest: str, log: cache.Log
) -> Tokenizer:
  """The configured tokenizer; a BPE is trained on `pieces` where the cache has it not."""
  if cfg.tokenizer_type == "byte":
    if cfg.tokenizer_path:
      raise ValueError(f"tokenizer_path={cfg.tokenizer_path} needs tokenizer_type=bpe, not byte")
    return ByteTokenizer()
  if cfg.tokenizer_path:
    return load_bpe(cfg.tokenizer_path)

  def build(folder: Path) -> None:
    log(f"training a BPE tokenizer of {vocab_size} ids")
    (folder / "tokenizer.json").write_text(train_bpe(_sample(pieces), vocab_size), encoding="utf-8")

  def fault(folder: Path) -> str | None:
    try:
      load_bpe(str(folder / "tokenizer.json"))
    except ValueError as error:
      return str(error)
    return None

  name = f"tokenizer-{_hash(store.FORMAT, digest, vocab_size, _SAMPLE)[:32]}"
  folder = cache.entry(cfg.dataset_cache_directory, name, build=build, fault=fault, log=log)
  return load_bpe(str(folder / "tokenizer.json"))


def _sample(pieces: Sequence[corpus.Piece]) -> Iterator[str]:
  """Parts of about _SAMPLE characters in all, from documents in an order that is not the alphabet's."""
  left = _SAMPLE
  for piece in sorted(pieces, key=lambda piece: _hash(piece.name)):
    for document in corpus.documents(piece):
      yield document[: min(left, _SAMPLE_OF_DOCUMENT)]
      left -= min(len(document), _SAMPLE_OF_DOCUMENT)
      if left <= 0:
        return


def _hash(*parts: Any) -> str:
  return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
