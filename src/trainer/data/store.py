"""A tokenised corpus on disk: an ArrayRecord file of windows for each split, and meta.json with their statistics."""

from __future__ import annotations

import contextlib
import json
import math
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainer.data import cache, corpus, windows
from trainer.data.tokenizer import Tokenizer

# Increase it when the files change, or the way in which text becomes windows.
FORMAT = 1
META = "meta.json"
# Characters that are tokenised at a time. The library needs about 100 bytes of memory for each.
_GROUP = 2_000_000
_PART = 250_000


def build(
  folder: Path,
  *,
  key: str,
  parts: dict[str, list[corpus.Piece]],
  tokenizer: Tokenizer,
  length: int,
  log: cache.Log,
) -> None:
  """Fills `folder` with one file of windows for each split, and meta.json."""
  dtype = "<u2" if tokenizer.vocab_size <= 2**16 else "<u4"
  splits, counts = {}, {}
  for split, pieces in parts.items():
    log(f"Tokenizing {sum(piece.size for piece in pieces) / 1e6:.1f} MB of text for {split} ({tokenizer.name})")
    counts[split] = np.zeros(tokenizer.vocab_size, np.int64)
    groups = _documents(pieces, tokenizer, counts[split])
    path = folder / file_name(split)
    count = _write(path, (windows.pack(window, np.dtype(dtype)) for window in windows.cut(groups, length)))
    splits[split] = {"windows": count, "bytes": path.stat().st_size, "targets": int(counts[split].sum())}
  meta = {
    "format": FORMAT,
    "key": key,
    "length": length,
    "dtype": dtype,
    "tokenizer": tokenizer.fingerprint,
    "splits": splits,
    "unigram_entropy": _cross_entropy(counts["train"], counts["train"]),
    "unigram_eval_loss": _cross_entropy(counts["eval"], counts["train"] + 1) if "eval" in counts else None,
  }
  (folder / META).write_text(json.dumps(meta, indent=2))


def _documents(
  pieces: Sequence[corpus.Piece], tokenizer: Tokenizer, target_counts: np.ndarray
) -> Iterator[list[np.ndarray]]:
  """Yields all documents in groups. A document is int32 ids: bos (if the tokenizer has it), the text's ids, eos.

  Adds to `target_counts` [vocab_size] how often each id is a target: each id of a document except the first.
  """
  head = [] if tokenizer.bos_id is None else [np.array([tokenizer.bos_id], np.int32)]
  tail = [np.array([tokenizer.eos_id], np.int32)]
  unfinished: list[np.ndarray] = []
  for group in _groups(_parts(pieces)):
    finished = []
    for ids, (_, is_last) in zip(tokenizer.encode_batch([text for text, _ in group]), group):
      unfinished.append(ids)
      if is_last:
        finished.append(np.concatenate([*head, *unfinished, *tail]))
        unfinished = []
        target_counts += np.bincount(finished[-1][1:], minlength=len(target_counts))
    yield finished


def _parts(pieces: Sequence[corpus.Piece]) -> Iterator[tuple[str, bool]]:
  """Yields (text, whether it ends the document). Long documents are cut into parts, after a line end where possible."""
  for piece in pieces:
    for document in corpus.documents(piece):
      place = 0
      while len(document) - place > _PART:
        end = document.rfind("\n", place, place + _PART) + 1 or place + _PART
        yield document[place:end], False
        place = end
      yield document[place:], True


def _groups(parts: Iterable[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
  """Yields the parts in lists of about _GROUP characters."""
  group, size = [], 0
  for part in parts:
    group.append(part)
    size += len(part[0])
    if size >= _GROUP:
      yield group
      group, size = [], 0
  yield group


def _cross_entropy(counts: np.ndarray, model_counts: np.ndarray) -> float | None:
  """Mean of -log(share in model_counts) over the items counted in `counts`, in nats. None without any items."""
  seen = counts > 0
  if not seen.any():
    return None
  log_share = np.log(model_counts[seen]) - math.log(model_counts.sum())
  return float(-(counts[seen] * log_share).sum() / counts.sum())


def _write(path: Path, records: Iterable[bytes]) -> int:
  """Returns the number of records, which it writes to an ArrayRecord file, one per chunk for random access."""
  writer = _array_record().ArrayRecordWriter(str(path), "group_size:1,uncompressed")
  count = 0
  for record in records:
    with _as_os_error(path):
      writer.write(record)
    count += 1
  with _as_os_error(path):
    writer.close()
  return count


@contextlib.contextmanager
def _as_os_error(path: Path) -> Iterator[None]:
  """Turns the RuntimeError that ArrayRecord raises, for example when the disk is full, into an OSError."""
  try:
    yield
  except RuntimeError as error:
    raise OSError(f"{path} cannot be written: {error}") from error


def _array_record() -> Any:
  with _uninterrupted():
    from array_record.python import array_record_module
  return array_record_module


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
  """Delays Ctrl-C to the end of the block. While array_record's C++ library loads, it would abort the process."""
  if threading.current_thread() is not threading.main_thread():  # signals interrupt only the main thread
    yield
    return
  pressed: list[int] = []
  handler = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
  try:
    yield
  finally:
    signal.signal(signal.SIGINT, handler)
  if pressed:
    signal.raise_signal(signal.SIGINT)


def open_reader(path: Path) -> Any:
  """A random-access reader of an ArrayRecord file. It raises RuntimeError when the file is damaged or absent."""
  return _array_record().ArrayRecordReader(str(path), "readahead_buffer_size:0,max_parallelism:0")


def fault(folder: Path) -> str | None:
  """What is wrong with a corpus folder, or None. Checks sizes and counts; a damaged record is found when it is read."""
  try:
    meta = json.loads((folder / META).read_text())
    for split, known in meta["splits"].items():
      path = folder / file_name(split)
      if path.stat().st_size != known["bytes"]:
        return f"{path.name} has {path.stat().st_size} bytes, not {known['bytes']}"
      if open_reader(path).num_records() != known["windows"]:
        return f"{path.name} does not hold {known['windows']} records"
  except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
    return f"{type(error).__name__}: {error}"
  return None


def file_name(split: str) -> str:
  """Name of the file of a split."""
  return f"{split}.array_record"
