"""The documents of a dataset: files in a fixed order, and a function that reads the documents of one file.

A source of documents is a file in this folder with such a function (`corpus`, `jsonl`, `parquet`, `array_record`,
`tfds`, `hf`). Tokenizing, packing, shuffling and mixing do not depend on where documents come from.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from input_pipeline import storage
from input_pipeline.data_files import File
from input_pipeline.input_errors import ConfigError

_AROUND_CUT = 2**16  # bytes that are read to find the end of a line


@dataclass(frozen=True)
class Conversation:
  """Messages with role and content. untrained: the numbers of the assistant's messages that must not be trained."""

  messages: tuple[dict[str, str], ...]
  untrained: frozenset[int] = frozenset()

  def __len__(self) -> int:
    """Characters, and one for each message: 0 only without messages."""
    return sum(1 + len(message["content"]) for message in self.messages)


@dataclass(frozen=True)
class MaskedIds:
  """Token ids with a mask. marked: [n] the id, or ~id where the token does not count in the loss."""

  marked: np.ndarray

  def __len__(self) -> int:
    return len(self.marked)


class LongText:
  """A text that is read in parts, so that a file larger than the memory can be tokenised."""

  def __init__(self, size: int, parts: Iterator[str]) -> None:
    """size: bytes."""
    self._size, self.parts = size, parts

  def __len__(self) -> int:
    """Bytes."""
    return self._size

  def head(self, characters: int) -> str:
    """The beginning of the text. The rest can then no longer be read."""
    return "".join(itertools.islice(itertools.chain.from_iterable(self.parts), characters))


# A text, the integer token ids [n] of a document that is tokenised already, or a conversation.
Document: TypeAlias = str | LongText | np.ndarray | MaskedIds | Conversation
UNMASKED, MASKED = "token ids", "token ids with a mask"
KINDS = {
  str: "text",
  LongText: "text",
  np.ndarray: UNMASKED,
  MaskedIds: MASKED,
  Conversation: "conversations",
}
TOKENS = frozenset((UNMASKED, MASKED))
JSON_OF_MESSAGES = "texts that are JSON of messages"


def _is_json_of_messages(text: str) -> bool:
  try:
    found = json.loads(text) if text.lstrip().startswith("[") else None
  except (ValueError, RecursionError):
    return False
  return isinstance(found, list) and bool(found) and all(isinstance(one, dict) and "content" in one for one in found)


@dataclass(frozen=True)
class Piece:
  """A file, or a part of a file that begins and ends at line ends."""

  name: str
  """Path relative to the dataset's folder, with '/'. Order and split depend on it, not on where the folder is."""
  path: File
  start: int
  stop: int  # in bytes; excluded

  @property
  def size(self) -> int:
    return self.stop - self.start


@dataclass(frozen=True)
class BadRecord:
  """A record, or several together, that cannot be read or has no document."""

  message: str
  """Names file and record, the reason, and what to do."""
  count: int = 1


class BadRecords:
  """The bad records of a split, which are skipped up to a limit."""

  def __init__(self, limit: int, log: Callable[[str], None] = lambda line: None) -> None:
    """limit: max_bad_records. `log` gets a line for each."""
    self.messages: list[str] = []
    self.count = 0
    self._limit, self._log = limit, log

  def add(self, bad: BadRecord) -> None:
    """Skips a record. Raises ConfigError if these are more than the limit."""
    self.count += bad.count
    self.messages.append(bad.message)
    if self.count > self._limit:
      more = f" These are {self.count} bad records, and max_bad_records={self._limit}." if self._limit else ""
      raise ConfigError(bad.message + more)
    self._log(f"Bad record {self.count} of at most {self._limit} is skipped: {bad.message}")


def nothing_to_check() -> None:
  """`Documents.check` of most formats."""


@dataclass(frozen=True)
class Documents:
  name: str
  """Where the documents come from, for the log."""
  pieces: Sequence[Piece]
  read: Callable[[Piece], Iterator[Document | BadRecord]]
  """Yields the documents of a piece in order. Raises ConfigError, naming the file, if it cannot be read at all."""
  format: str
  """What decides, with the bytes of the files, which documents they have: format and column."""
  cut: Callable[[Piece, int], list[Piece]]
  """The piece in parts of about `limit` bytes that hold whole documents, where the format allows it."""
  check: Callable[[], None] = nothing_to_check
  """Raises ConfigError for files that are broken at first sight."""
  left_out: str = ""
  """What is at the given places and is not read, for the log."""
  elements: Any = None
  """`elements.Elements`, if these are the elements of a dataset in Python."""
  bytes: int = 0
  """Estimated, of the documents among these elements."""

  @property
  def size(self) -> int:
    return self.bytes if self.elements else sum(piece.size for piece in self.pieces)

  def valid(self, bad: BadRecords, hashes: list[str] | None = None) -> Iterator[tuple[str, Document]]:
    """Yields (place for messages, document) of all documents that are not empty. Adds other records to `bad`.

    hashes: gets a hash of the documents of each piece, when all of them have been read. Raises ConfigError if the
    documents are of several kinds, or there are too many bad records.
    """
    kind = ""
    for piece in self.pieces:
      content = hashlib.sha256()
      for number, document in enumerate(self.read(piece), 1):
        if isinstance(document, BadRecord):
          bad.add(document)
          content.update(f"bad {document.count}".encode())
          continue
        if not len(document):
          continue
        found = KINDS[type(document)]
        kind = kind or found
        if found != kind and not (self.elements and {found, kind} <= TOKENS):
          raise ConfigError(
            f"{place(piece, number)} is {found}, and documents before it are not. Give documents of one kind."
          )
        if isinstance(document, LongText):
          document = LongText(len(document), _hashed(document.parts, content))
        else:
          _add(content, document)
        yield place(piece, number), document
        if isinstance(document, LongText):
          collections.deque(document.parts, 0)  # whoever needed only its beginning
      if hashes is not None:
        hashes.append(content.hexdigest())

  def kind(self, max_bad_records: int) -> str:
    """Of KINDS, or JSON_OF_MESSAGES, that of the first document.

    Raises ConfigError without a document, or if too many are bad before it.
    """
    for _, document in self.valid(BadRecords(max_bad_records)):
      is_json = isinstance(document, str) and _is_json_of_messages(document)
      return JSON_OF_MESSAGES if is_json else KINDS[type(document)]
    raise ConfigError(f"{self.name} has no documents. Give files with at least one document that is not empty.")

  def may_be_masked(self, max_bad_records: int) -> bool:
    """Whether some documents may be MaskedIds. Raises ConfigError as `kind`."""
    return bool(self.elements) or self.kind(max_bad_records) == MASKED


def _add(content: Any, document: str | np.ndarray | MaskedIds | Conversation) -> None:
  """Adds a document to a hash, so that two sequences of documents have the same hash only if they are equal."""
  match document:
    case str():
      data = document.encode("utf-8", "surrogatepass")
    case Conversation():
      data = json.dumps([document.messages, sorted(document.untrained)], sort_keys=True).encode()
    case _:
      data = (document.marked if isinstance(document, MaskedIds) else document).astype("<i8").tobytes()
  content.update(data)
  content.update(b"%b %d" % (KINDS[type(document)].encode(), len(data)))


def _hashed(parts: Iterator[str], content: Any) -> Iterator[str]:
  """Yields the parts, and adds their text to a hash as `_add` does."""
  size = 0
  for part in parts:
    data = part.encode()
    size += len(data)
    content.update(data)
    yield part
  content.update(b"text %d" % size)


def place(piece: Piece, number: int) -> str:
  """Names the document `number` of a piece, from 1, in a message."""
  after = f" after byte {piece.start}" if piece.start else ""
  return f"document {number} of {piece.path}{after}"


@contextmanager
def naming(path: File) -> Iterator[None]:
  """Turns an OSError inside the block into a ConfigError with the path."""
  try:
    yield
  except OSError as error:
    storage.raise_outage("read", path, error)
    raise ConfigError(f"{path} cannot be read ({error.strerror or error}). Fix or remove it.") from error


def uncut(piece: Piece, limit: int) -> list[Piece]:
  """The piece as a whole: for formats whose files cannot be read in parts."""
  return [piece]


def cut_at_lines(piece: Piece, limit: int) -> list[Piece]:
  """The piece in parts of similar size, each of `limit` bytes or less and the rest of its last line.

  Raises ConfigError if the file cannot be read.
  """
  if piece.size <= limit:
    return [piece]
  size = math.ceil(piece.size / math.ceil(piece.size / limit))
  cuts = [piece.start]
  with naming(piece.path), piece.path.open("rb", _AROUND_CUT) as file:
    while cuts[-1] < piece.stop:
      file.seek(min(cuts[-1] + size, piece.stop) - 1)
      file.readline()
      cuts.append(min(file.tell(), piece.stop))
  return [replace(piece, start=start, stop=stop) for start, stop in itertools.pairwise(cuts)]


def line_number(path: File, offset: int) -> int:
  """Number of the line (from 1) that contains byte `offset`. Raises ConfigError if the file cannot be read."""
  count = 1
  with naming(path), path.open("rb") as file:
    while offset > 0 and (block := file.read(min(offset, 2**20))):
      count += block.count(b"\n")
      offset -= len(block)
  return count
