"""Examples of a dataset: tokenized and packed once into a file of windows, then read by global index."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from input_pipeline import cache, chat_template, contents, prepare, store, windows, workers
from input_pipeline.batch import Example, empty_example
from input_pipeline.conversations import ChatTokenizer
from input_pipeline.documents import JSON_OF_MESSAGES, TOKENS, BadRecords, Documents, LongText
from input_pipeline.input_errors import ConfigError
from input_pipeline.order import Order, identity
from input_pipeline.progress import tell
from input_pipeline.source import Source
from input_pipeline.tokenizer import BpeTokenizer, ByteTokenizer, Tokenizer, load_bpe, train_bpe

if TYPE_CHECKING:
  from input_pipeline.options import DataOptions  # pydantic is slow to import and not needed here

# Characters to train a tokenizer on. All 12 MB of the standard library would save 2 % of the tokens, but take long.
_SAMPLE = 3_000_000
_SAMPLE_OF_DOCUMENT = 100_000
_CHAT_COLUMNS = ("messages", "conversations", "conversation", "chat", "dialog", "dialogue")
_DIGESTS = "digests"  # what `contents.Stamps` keeps: {split: identity}
_EVAL_KEYS = {
  "text": "Set eval_fraction or eval_dataset_path",
  "grain": "Set grain_eval_files",
  "tfds": "Set eval_split",
  "hf": "Set eval_split",
}


class PreparedSource(Source):
  """The windows of one split of prepared data."""

  def __init__(self, folder: Path, *, name: str, split: str, seed: int, tokenizer: Tokenizer | None) -> None:
    """`folder`: of `prepare.build`. `tokenizer`: None if the documents were tokens. Raises ConfigError if its first
    record cannot be read."""
    meta = json.loads((folder / prepare.META).read_text())
    self.name = name
    self.tokenizer = tokenizer
    self.num_examples = meta["splits"][split]["windows"]
    self.num_targets = meta["splits"][split]["targets"]
    self.has_eval = meta["splits"].get("eval", {"targets": 0})["targets"] > 0
    bad = meta["splits"][split].get("bad", {"records": 0, "messages": []})
    self.bad_records = bad["records"]
    self._bad = f" bad={contents.hash_of(bad['messages'])}" if self.bad_records else ""
    self._meta = meta
    self._split = split
    opened = partial(store.Records, folder / prepare.file_name(split), meta["splits"][split]["windows"])
    self._records = opened()
    try:
      first = windows.unpack(opened()[0], np.dtype(meta["dtype"]))  # not of self._records: their files stay closed
    except OSError as error:
      raise ConfigError(str(error)) from error
    self.order = Order(self._records, split=split, seed=seed, source=identity(len(self._records), first))

  def example(self, index: int) -> Example:
    """The window at `index` in the order of the split. Raises OSError, naming the file, when it cannot be read."""
    record = self.order.record(index)
    if record is None:
      return empty_example(self._meta["length"])
    return windows.example(windows.unpack(record, np.dtype(self._meta["dtype"])), self._meta["length"])

  def fingerprint(self) -> str:
    return f"prepared-{prepare.FORMAT} {self._meta['key']} {self.order.fingerprint}{self._bad}"

  def unigram_entropy(self) -> float | None:
    return self._meta["unigram_entropy"]

  def unigram_eval_loss(self) -> float | None:
    return self._meta["unigram_eval_loss"]

  def close(self) -> None:
    self._records.close()


def check(cfg: DataOptions, splits: Mapping[str, Documents], vocab_size: int, call: workers.Call) -> None:
  """Raises ConfigError for data that cannot be prepared, as far as the first document of each split shows it.

  A check of seconds, before devices are used: a missing package, a wrong column or type, a tokenizer with more ids than
  `vocab_size`. `splits`: {} for text, whose files have been checked with the configuration.
  """
  kinds = {_kind(cfg, documents, call) for documents in splits.values()}
  if cfg.dataset_type == "text" or kinds - TOKENS:
    tokenizer = _given_tokenizer(cfg)
    _require_fit(tokenizer, vocab_size)
    if "conversations" in kinds:
      _chat_tokenizer(cfg, tokenizer)


def open_source(
  cfg: DataOptions,
  splits: Mapping[str, Documents],
  *,
  vocab_size: int,
  min_examples: int,
  split: str,
  log: cache.Log,
  call: workers.Call,
  tokenizer: Tokenizer | None = None,
) -> PreparedSource:
  """The source of one of the `splits` that belong together. Prepares the data first if the cache does not have them.

  call: how the preparation is called. tokenizer: of text, instead of the configured one. Raises ConfigError if there is
  too little data for `min_examples` windows, or for one token.
  """
  if cfg.dataset_type == "text" and cfg.packing == "split":
    # Each target is at least a byte, or the end of a document. Refuse far too little text before anything is cached.
    most = sum(piece.size + 1 for piece in splits[split].pieces) if split in splits else 0
    _check_enough(cfg, splits, split, min_examples, most, most / cfg.max_target_length, "at most ")
  folder, tokenizer = prepared(cfg, splits, vocab_size=vocab_size, log=log, call=call, tokenizer=tokenizer)
  known = json.loads((folder / prepare.META).read_text())["splits"].get(split, {"targets": 0, "windows": 0})
  if "lost" in known:
    log(f"warning: {splits[split].name}: {known['lost']}")
  for line in known.get("chats", ()):
    log(f"{splits[split].name}: {line}")
  if "chats" in known and not known["targets"]:
    raise ConfigError(
      f"{splits[split].name}: {known['chats'][0]}.\nSet max_target_length to the tokens up to the end of an answer, or "
      "give conversations in which the assistant answers."
    )
  if "bad" in known:
    require_few(known["bad"]["records"], known["bad"]["messages"], cfg.max_bad_records, splits[split].name, log)
  _check_enough(cfg, splits, split, min_examples, known["targets"], known["windows"])
  return PreparedSource(folder, name=splits[split].name, split=split, seed=cfg.data_shuffle_seed, tokenizer=tokenizer)


def require_few(count: int, messages: Sequence[str], limit: int, name: str, log: cache.Log) -> None:
  """Logs the bad records of a source. Raises ConfigError if they are more than `limit`."""
  if count > limit:
    raise ConfigError(
      f"{name} has {count} bad records, and max_bad_records={limit}. The first: {messages[0]}\n"
      f"Fix the file, or set max_bad_records={count} to skip them."
    )
  log(f"{name}: {count} bad records are skipped, with max_bad_records={limit}:")
  for message in messages:
    log(f"  {message}")


def _check_enough(
  cfg: DataOptions,
  splits: Mapping[str, Documents],
  split: str,
  min_examples: int,
  targets: int,
  examples: float,
  bound: str = "",
) -> None:
  """Raises ConfigError if there is no token to learn, or there are fewer than `min_examples` examples."""
  if targets >= 1 and examples >= min_examples:
    return
  remedy = f"{_EVAL_KEYS[cfg.dataset_type]}, or eval_steps=0 eval_interval=-1."
  if split == "train":
    remedy = "Give more text, or reduce the batch size or max_target_length."
  found = f"{bound}{targets}" if targets else "0"
  name = splits.get(split, next(iter(splits.values()))).name
  raise ConfigError(
    f"The {split} text of {name} has {found} tokens to learn, but {max(1, min_examples)} examples of "
    f"max_target_length={cfg.max_target_length} are needed (packing={cfg.packing}). {remedy}"
  )


def prepared(
  cfg: DataOptions,
  splits: Mapping[str, Documents],
  *,
  vocab_size: int,
  log: cache.Log,
  call: workers.Call,
  tokenizer: Tokenizer | None = None,
) -> tuple[Path, Tokenizer | None]:
  """(folder with the windows of all splits, tokenizer), both from the cache or made now; see `prepare`.

  tokenizer: of text, instead of the configured one. The result's is None if the documents are tokens. Raises
  ConfigError if the documents cannot be read, or the tokenizer has more than `vocab_size` ids.
  """
  tokenizer = tokenizer_of(cfg, splits, vocab_size=vocab_size, log=log, call=call, given=tokenizer)
  # The model's vocabulary matters only for tokens that are given. Text has the ids of its tokenizer.
  ids = tokenizer.vocab_size if tokenizer else vocab_size
  settings = [prepare.FORMAT, tokenizer.fingerprint if tokenizer else ids, cfg.max_target_length, cfg.packing]
  like = f"corpus-{contents.hash_of(*settings, {split: contents.names(one) for split, one in splits.items()})[:16]}"
  stamps, directory = contents.Stamps(splits.values()), cfg.dataset_cache_directory
  name_of = lambda digests: f"{like}-{contents.hash_of(digests)[:32]}"

  digests: dict[str, str] | None = None

  def find() -> str | None:
    nonlocal digests
    digests = digests or stamps.recall(directory, _DIGESTS)
    if digests is None and any(Path(directory).expanduser().glob(f"{like}-*")):
      work = partial(contents.read_all, splits, cfg.max_bad_records)
      digests = call(work, f"it read {next(iter(splits.values())).name}")
      stamps.keep(directory, _DIGESTS, digests, log)
    return name_of(digests) if digests else None

  def build(folder: Path) -> str:
    nonlocal digests
    work = partial(
      prepare.build,
      folder,
      splits=splits,
      tokenizer=tokenizer,
      vocab_size=ids,
      length=cfg.max_target_length,
      packing=cfg.packing,
      max_bad_records=cfg.max_bad_records,
    )
    digests = call(work, f"it prepared {next(iter(splits.values())).name}", log)
    if contents.Stamps(splits.values()).key != stamps.key:
      names = ", ".join(documents.name for documents in splits.values())
      raise ConfigError(f"Files of {names} have changed while they were read. Start again when they are complete.")
    stamps.keep(directory, _DIGESTS, digests, log)
    return name_of(digests)

  return cache.found(directory, like, find=find, build=build, fault=prepare.fault, log=log), tokenizer


def tokenizer_of(
  cfg: DataOptions,
  splits: Mapping[str, Documents],
  *,
  vocab_size: int,
  log: cache.Log,
  call: workers.Call,
  given: Tokenizer | None = None,
) -> Tokenizer | None:
  """The tokenizer of the documents: given, or trained on the first split, or in the cache; None if they are tokens.

  Raises ConfigError if the splits have different kinds of documents, or the tokenizer has more than `vocab_size` ids.
  """
  kinds = {split: _kind(cfg, documents, call) for split, documents in splits.items()}
  if len(set(kinds.values()) - TOKENS) + bool(TOKENS & set(kinds.values())) > 1:
    found = ", ".join(f"{split}: {kind}" for split, kind in kinds.items())
    raise ConfigError(f"The splits of a dataset must have the same kind of documents ({found}). Give other files.")
  first = next(iter(splits))
  if kinds[first] in TOKENS:
    return None
  base = given.base if isinstance(given, ChatTokenizer) else given
  if kinds[first] == "conversations":
    tokenizer = given
    if base is given:
      tokenizer = chat = _chat_tokenizer(cfg, base or _given_tokenizer(cfg))
      if cfg.train_on == "assistant" and (problem := chat.turn_end_problem()):
        tell(f"warning: {problem}")
  else:
    tokenizer = base or _tokenizer(cfg, vocab_size, splits[first], log, call)
  _require_fit(tokenizer, vocab_size)
  return tokenizer


def _chat_tokenizer(cfg: DataOptions, tokenizer: Tokenizer | None) -> ChatTokenizer:
  """The tokenizer of conversations. Raises ConfigError if it has no file or no chat template."""
  if not isinstance(tokenizer, BpeTokenizer):
    raise ConfigError(
      f"tokenizer_type={cfg.tokenizer_type}: conversations need a tokenizer whose special tokens end a turn.\n"
      "Set tokenizer_type=bpe and tokenizer_path, or load_parameters_path to a model that has one."
    )
  return ChatTokenizer(tokenizer, chat_template.find(cfg, tokenizer), cfg.train_on, cfg.max_target_length)


def _kind(cfg: DataOptions, documents: Documents, call: workers.Call) -> str:
  """What the documents are, of `documents.KINDS`.

  The cache remembers it, because reading even one document may load a large library.
  """
  if cfg.dataset_type == "text":
    return "text"

  def read() -> str:
    documents.check()
    return call(partial(documents.kind, cfg.max_bad_records), f"it read {documents.name}")

  kind = contents.Stamps([documents]).remembered(cfg.dataset_cache_directory, "kind", read, tell)
  if kind != JSON_OF_MESSAGES:
    return kind
  if cfg.chat_template_path or cfg.train_data_columns.rpartition(".")[2] in _CHAT_COLUMNS:
    raise ConfigError(
      f"train_data_columns={cfg.train_data_columns}: in {documents.name} it has texts that are JSON of messages, which "
      "would be trained on as texts.\nWrite lists of messages instead, for example with json.loads of each record."
    )
  return "text"


def _require_fit(tokenizer: Tokenizer | None, vocab_size: int) -> None:
  """Raises ConfigError if the tokenizer has more ids than the model."""
  if tokenizer is not None and tokenizer.vocab_size > vocab_size:
    raise ConfigError(
      f"vocab_size={vocab_size} is smaller than the {tokenizer.name} tokenizer's {tokenizer.vocab_size} ids. "
      f"Set vocab_size to at least {tokenizer.vocab_size}."
    )


def _given_tokenizer(cfg: DataOptions) -> Tokenizer | None:
  """The configured tokenizer; None if it must be trained on the text."""
  if cfg.tokenizer_type == "byte":
    return ByteTokenizer()
  return load_bpe(cfg.tokenizer_path, cfg.bos_token, cfg.eos_token) if cfg.tokenizer_path else None


def _tokenizer(
  cfg: DataOptions, vocab_size: int, documents: Documents, log: cache.Log, call: workers.Call
) -> Tokenizer:
  """The configured tokenizer. Trains a BPE on `documents` if no file is given and the cache does not have it."""
  if given := _given_tokenizer(cfg):
    return given

  def build(folder: Path) -> None:
    log(f"Training a BPE tokenizer of {vocab_size} ids")
    work = partial(_train, documents, cfg.max_bad_records, vocab_size)
    text = call(work, f"it trained a tokenizer on {documents.name}")
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")

  def fault(folder: Path) -> str | None:
    try:
      load_bpe(str(folder / "tokenizer.json"))
    except ConfigError as error:
      return str(error)
    return None

  read = lambda: call(partial(_hash_of_sample, documents, cfg.max_bad_records), f"it read {documents.name}")
  sample = contents.Stamps([documents]).remembered(cfg.dataset_cache_directory, "sample", read, log)
  name = f"tokenizer-{contents.hash_of(prepare.FORMAT, sample, vocab_size)[:32]}"
  folder = cache.entry(cfg.dataset_cache_directory, name, build=build, fault=fault, log=log)
  return load_bpe(str(folder / "tokenizer.json"))


def _train(documents: Documents, max_bad_records: int, vocab_size: int) -> str:
  """The JSON of a BPE that is learned from some of the documents."""
  return train_bpe(_sample(documents, BadRecords(max_bad_records)), vocab_size)


def _hash_of_sample(documents: Documents, max_bad_records: int) -> str:
  """64 hex digits of what a tokenizer is trained on."""
  return contents.hash_of(list(_sample(documents, BadRecords(max_bad_records))))


def _sample(documents: Documents, bad: BadRecords) -> Iterator[str]:
  """Yields beginnings of texts, about _SAMPLE characters in total, from files in the order of a hash."""
  left = _SAMPLE
  in_order_of_hash = sorted(documents.pieces, key=lambda piece: contents.hash_of(piece.name))
  for _, document in dataclasses.replace(documents, pieces=in_order_of_hash).valid(bad):
    assert isinstance(document, str | LongText), "a tokenizer learns from text"
    most = min(left, _SAMPLE_OF_DOCUMENT)
    text = document[:most] if isinstance(document, str) else document.head(most)
    yield text
    left -= len(text)
    if left <= 0:
      return
