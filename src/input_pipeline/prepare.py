"""A prepared dataset on disk: a file of packed windows for each split, and meta.json with their statistics."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from input_pipeline import best_fit, cache, contents, conversations, store, windows
from input_pipeline.conversations import ChatTokenizer
from input_pipeline.documents import (
  BadRecord,
  BadRecords,
  Conversation,
  Document,
  Documents,
  LongText,
  MaskedIds,
)
from input_pipeline.input_errors import ConfigError, shorten
from input_pipeline.progress import tell
from input_pipeline.tokenizer import COMPLETE, ByteTokenizer, Tokenizer

# Increase it when the files change, or the way in which documents become windows.
FORMAT = 3
META = "meta.json"
PACKINGS = {"split": windows.split, "best_fit": best_fit.pack, "none": windows.single}
# Characters or tokens that are processed at a time. The tokenizer needs about 100 bytes of memory for each character.
_GROUP = 2_000_000
_REPORT_SECONDS = 10
_NONE = np.zeros(0, np.int32)

Group: TypeAlias = list[tuple[str, Document]]  # places for messages, and documents


def build(
  folder: Path,
  log: cache.Log,
  *,
  splits: Mapping[str, Documents],
  tokenizer: Tokenizer | None,
  vocab_size: int,
  length: int,
  packing: str,
  max_bad_records: int,
) -> dict[str, str]:
  """Fills `folder` with one file of windows for each split, and meta.json. Returns the identity of each split.

  `tokenizer`: of documents that are text; None if all documents are tokens. `vocab_size`: all tokens are below it.
  Raises ConfigError if a document cannot be read or has other tokens.
  """
  is_masked = tokenizer is None and any(one.may_be_masked(max_bad_records) for one in splits.values())
  dtype = "<i4" if is_masked or isinstance(tokenizer, ChatTokenizer) else "<u2" if vocab_size <= 2**16 else "<u4"
  if shortage := _shortage(folder, splits, tokenizer, np.dtype(dtype).itemsize):
    tell(f"warning: {shortage}")
  known: dict[str, dict[str, Any]] = {}
  counts: dict[str, np.ndarray] = {}
  digests: dict[str, str] = {}
  for split, documents in splits.items():
    work = f"Tokenizing ({tokenizer.name})" if tokenizer else "Packing tokens of"
    log(f"{work} {documents.size / 1e6:.1f} MB from {documents.name} for {split}")
    counts[split] = np.zeros(vocab_size, np.int64)
    bad = BadRecords(max_bad_records, tell)  # `log` gets all of them when the data are opened
    lost = Lost()
    hashes: list[str] = []
    some = _reported(groups(documents, _GROUP, bad, hashes), documents.name)
    cut = packed(packing, tokenizer)(token_groups(some, tokenizer, vocab_size, bad, lost), length)
    path = folder / file_name(split)
    count = store.write(path, (windows.pack(window, np.dtype(dtype)) for window in _counted(cut, counts[split])))
    digests[split] = contents.identity(documents, hashes)
    known[split] = {"windows": count, "targets": int(counts[split].sum())}
    if bad.count:
      known[split]["bad"] = {"records": bad.count, "messages": bad.messages}
    if str(lost):
      known[split]["lost"] = str(lost)
    if isinstance(tokenizer, ChatTokenizer):
      known[split]["chats"] = list(lost.chats.lines())
  meta = {
    "format": FORMAT,
    "key": contents.hash_of(FORMAT, digests, tokenizer.fingerprint if tokenizer else vocab_size, length, packing),
    "length": length,
    "dtype": dtype,
    "tokenizer": tokenizer.fingerprint if tokenizer else None,
    "packing": packing,
    "splits": known,
    "unigram_entropy": _cross_entropy(counts["train"], counts["train"]) if "train" in counts else None,
    "unigram_eval_loss": _cross_entropy(counts["eval"], counts["train"] + 1) if len(counts) == 2 else None,
  }
  (folder / META).write_text(json.dumps(meta, indent=2))
  return digests


def packed(
  packing: str, tokenizer: Tokenizer | None
) -> Callable[[Iterable[windows.Group], int], Iterator[windows.Window]]:
  """The function that packs documents. Conversations are never cut, so packing=split packs whole ones."""
  is_chat = isinstance(tokenizer, ChatTokenizer) and packing == "split"
  return PACKINGS["best_fit" if is_chat else packing]


class Lost:
  """How much of the texts the tokenizer cannot represent. As a string: a sentence, or nothing. chats: what became of
  conversations."""

  def __init__(self) -> None:
    self.chats = conversations.Tally()
    self._tokens = self._characters = self._unknown = self._missing = 0

  def add(self, tokenizer: Tokenizer, text: str, ids: np.ndarray) -> None:
    unknown, missing = tokenizer.lost(text, ids)
    self._tokens, self._characters = self._tokens + len(ids), self._characters + len(text)
    self._unknown, self._missing = self._unknown + unknown, self._missing + missing

  def __str__(self) -> str:
    if self._unknown:
      what = f"{self._unknown / self._tokens:.2%} of the tokens stand for unknown text"
    elif self._missing:
      what = f"the tokenizer has no token for {self._missing / self._characters:.2%} of the characters, which are lost"
    else:
      return ""
    return f"{what}. {COMPLETE}."


def token_groups(
  groups: Iterable[Group], tokenizer: Tokenizer | None, vocab_size: int, bad: BadRecords, lost: Lost | None = None
) -> Iterator[windows.Group]:
  """Yields the documents of `groups` as int32 ids, in groups.

  A text becomes bos (if the tokenizer has it), the ids of the text, eos. Tokens stay as they are. Texts that the
  tokenizer cannot represent at all, and documents of tokens that are not below `vocab_size`, are added to `bad`, which
  may raise ConfigError. `lost` counts what the tokenizer cannot represent. Conversations: see `ChatTokenizer`.
  """
  lost = lost or Lost()
  for group in groups:
    if isinstance(tokenizer, ChatTokenizer):
      yield list(_of_conversations(group, tokenizer, bad, lost))
      continue
    if tokenizer is not None:
      begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
      head, end = np.array(begin, np.int32), np.array([tokenizer.eos_id], np.int32)
      if len(group) == 1 and isinstance(text := group[0][1], LongText):
        parts = _ids_of_long_text(group[0][0], text, tokenizer, bad, lost)
        if (first := next(parts, None)) is not None:
          yield [windows.LongTokens(itertools.chain([head, first], parts, [end]))]
      else:
        yield [np.concatenate([head, ids, end]) for ids in _ids_of_texts(group, tokenizer, bad, lost)]
      continue
    finished = []
    for place, document in group:
      try:
        if isinstance(document, MaskedIds):
          checked(np.maximum(document.marked, ~document.marked), vocab_size)
          finished.append(document.marked.astype(np.int32))
          continue
        assert isinstance(document, np.ndarray), "texts need a tokenizer"
        finished.append(checked(document, vocab_size))
      except ValueError as error:
        bad.add(BadRecord(f"{place}: {error}"))
    yield finished


def _ids_of_texts(group: Group, tokenizer: Tokenizer, bad: BadRecords, lost: Lost) -> Iterator[np.ndarray]:
  """Yields the ids of the texts of a group that the tokenizer can represent."""
  texts = [document for _, document in group if isinstance(document, str)]
  encoded: Sequence[np.ndarray | ConfigError]
  try:
    encoded = tokenizer.encode_batch(texts)
  except ConfigError:
    encoded = [_alone(tokenizer, text) for text in texts]
  for (place, _), text, ids in zip(group, texts, encoded, strict=True):
    if isinstance(ids, ConfigError):
      bad.add(BadRecord(f"{place}: {ids}"))
    elif not len(ids) and text.strip():
      bad.add(_without_tokens(place, text, len(text)))
    else:
      lost.add(tokenizer, text, ids)
      yield ids


def _ids_of_long_text(
  place: str, text: LongText, tokenizer: Tokenizer, bad: BadRecords, lost: Lost
) -> Iterator[np.ndarray]:
  """Yields the ids of a long text in parts; nothing if the tokenizer cannot represent any of it.

  Raises ConfigError if the tokenizer fails: the text cannot be skipped, because its beginning has been used.
  """
  beginning, size, found = "", 0, False

  def counted() -> Iterator[str]:
    nonlocal beginning, size
    for part in text.parts:
      lost.add(tokenizer, part, _NONE)
      beginning, size = beginning or part.strip(), size + len(part)
      yield part

  try:
    for ids in tokenizer.encode_parts(counted()):
      if len(ids):
        found = True
        lost.add(tokenizer, "", ids)
        yield ids
  except ConfigError as error:
    raise ConfigError(f"{place}: {error}") from error
  if beginning and not found:
    bad.add(_without_tokens(place, beginning, size))
  elif not found:
    yield _NONE


def _without_tokens(place: str, text: str, size: int) -> BadRecord:
  some = f"any of its {size:,} characters ({shorten(text.strip())!r})"
  return BadRecord(f"{place}: the tokenizer has no token for {some}. {COMPLETE}.")


def _of_conversations(group: Group, tokenizer: ChatTokenizer, bad: BadRecords, lost: Lost) -> Iterator[np.ndarray]:
  chats = [document for _, document in group if isinstance(document, Conversation)]
  for (place, _), chat, found in zip(group, chats, tokenizer.encode_conversations(chats, lost.chats), strict=True):
    if isinstance(found, ValueError):
      bad.add(BadRecord(f"{place}: {found}. Fix or remove it, or set chat_template_path."))
    elif found:
      text = "".join(message["content"] for message in chat.messages)
      lost.add(tokenizer, text, np.concatenate([np.maximum(ids, ~ids) for ids in found]))
      yield from found


def _alone(tokenizer: Tokenizer, text: str) -> np.ndarray | ConfigError:
  try:
    return tokenizer.encode_batch([text])[0]
  except ConfigError as error:
    return error


def checked(ids: np.ndarray, vocab_size: int) -> np.ndarray:
  """`ids`, at least one, as int32. Raises ValueError unless all are in [0, vocab_size)."""
  low, high = int(ids.min()), int(ids.max())
  if low < 0 or high >= vocab_size:
    raise ValueError(
      f"it has the token {low if low < 0 else high}, but tokens must be from 0 to vocab_size - 1 = {vocab_size - 1}. "
      "Set vocab_size to the vocabulary that the tokens were made with, or give other files."
    )
  return ids.astype(np.int32)


def groups(documents: Documents, characters: int, bad: BadRecords, hashes: list[str] | None = None) -> Iterator[Group]:
  """Yields the documents in lists of about so many characters or tokens, a long text alone. Bad records are added to
  `bad`, hashes of the documents of each piece to `hashes`."""
  group: Group = []
  size = 0
  for place, document in documents.valid(bad, hashes):
    if isinstance(document, LongText) and group:
      yield group
      group, size = [], 0
    group.append((place, document))
    size += len(document)
    if size >= characters or isinstance(document, LongText):
      yield group
      group, size = [], 0
  yield group


def _shortage(folder: Path, splits: Mapping[str, Documents], tokenizer: Tokenizer | None, token_bytes: int) -> str:
  """A message if the prepared data will probably not fit into `folder`; "" otherwise.

  A byte tokenizer makes a token of each byte, and others a token of about four. Compressed files need more than this.
  """
  tokens = sum(documents.size for documents in splits.values())
  if not isinstance(tokenizer, ByteTokenizer):
    tokens //= 4
  needed, free = tokens * token_bytes / 1e9, shutil.disk_usage(folder).free / 1e9
  if needed <= free:
    return ""
  return (
    f"the prepared data will need about {needed:.3g} GB in {folder.parent.parent}, and {free:.3g} GB are free. Free "
    "space, or set dataset_cache_directory to another folder"
  )


def _reported(groups: Iterable[Group], name: str) -> Iterator[Group]:
  """Yields the groups, and prints the progress of a long preparation: the log is not open yet."""
  size, reported = 0, time.monotonic()
  for group in groups:
    yield group
    size += sum(len(document) for _, document in group)
    if time.monotonic() - reported > _REPORT_SECONDS:
      reported = time.monotonic()
      tell(f"Preparing {name}: {size / 1e6:,.0f} million characters or tokens, at {group[-1][0]}")


def _counted(cut: Iterable[windows.Window], counts: np.ndarray) -> Iterator[windows.Window]:
  """Yields the windows, and adds to `counts` [vocab_size] how often each token is a target that counts in the loss."""
  targets: list[np.ndarray] = []
  size = 0
  for window in cut:
    targets.append(windows.targets(window))
    size += len(window.tokens)
    if size >= _GROUP:
      counts += np.bincount(np.concatenate(targets), minlength=len(counts))
      targets, size = [], 0
    yield window
  if targets:
    counts += np.bincount(np.concatenate(targets), minlength=len(counts))


def _cross_entropy(counts: np.ndarray, model_counts: np.ndarray) -> float | None:
  """Mean of -log(share in model_counts) over the items counted in `counts`, in nats. None without any items."""
  seen = counts > 0
  if not seen.any():
    return None
  log_share = np.log(model_counts[seen]) - math.log(model_counts.sum())
  return float(-(counts[seen] * log_share).sum() / counts.sum())


def fault(folder: Path) -> str | None:
  """What is wrong with a prepared folder, or None."""
  try:
    meta: dict[str, Any] = json.loads((folder / META).read_text())
    for split, known in meta["splits"].items():
      if wrong := store.fault(folder / file_name(split), known["windows"]):
        return wrong
  except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
    return f"{type(error).__name__}: {error}"
  return None


def file_name(split: str) -> str:
  return f"{split}.records"
