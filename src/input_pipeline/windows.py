"""Windows: T + 1 tokens of one or more documents, and the example that a window stands for.

With packing=split, documents are joined into a stream, which is cut into windows. Neighbouring windows overlap by one
token, so that each token of the stream except the first is the target of exactly one position of exactly one window.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from input_pipeline.batch import Example


class Window(NamedTuple):
  """Parts of documents: n + 1 tokens, 1 <= n <= T."""

  tokens: np.ndarray  # [n + 1] int32: the id, or ~id where it does not count in the loss
  starts: np.ndarray  # [boundaries] int64: offsets in 1..n at which a document begins, ascending


class LongTokens:
  """The tokens of a long document, read once in parts. Its length is the number of those that have been read."""

  def __init__(self, parts: Iterator[np.ndarray]) -> None:
    self._parts, self._count = parts, 0

  def __iter__(self) -> Iterator[np.ndarray]:
    for part in self._parts:
      self._count += len(part)
      yield part

  def __len__(self) -> int:
    return self._count

  def whole(self) -> np.ndarray:
    """All tokens [n]."""
    return np.concatenate(list(self))


Group: TypeAlias = Sequence[np.ndarray | LongTokens]
"""Documents that are not empty."""


def _runs(groups: Iterable[Group]) -> Iterator[tuple[list[np.ndarray], list[bool]]]:
  """Yields (arrays, whether a document begins with each): the documents of a group, or a part of a long document."""
  for group in groups:
    arrays: list[np.ndarray] = []
    for document in group:
      if isinstance(document, np.ndarray):
        arrays.append(document)
        continue
      yield arrays, [True] * len(arrays)
      yield from (([part], [not i]) for i, part in enumerate(document))
      arrays = []
    yield arrays, [True] * len(arrays)


def split(groups: Iterable[Group], length: int) -> Iterator[Window]:
  """Yields the windows of T = `length` inputs of all documents joined."""
  rest, rest_starts = np.zeros(0, np.int32), np.zeros(0, np.int64)
  for arrays, begins in _runs(groups):
    lengths = [len(rest)] + [len(array) for array in arrays]
    starts = np.concatenate([rest_starts, np.cumsum(lengths)[:-1][begins]])
    stream = np.concatenate([rest, *arrays])
    place = 0
    while place + length < len(stream):
      first, last = np.searchsorted(starts, [place, place + length], side="right")
      yield Window(stream[place : place + length + 1], starts[first:last] - place)
      place += length
    rest, rest_starts = stream[place:], starts[starts > place] - place
  if len(rest) > 1:
    yield Window(rest, rest_starts)


def single(groups: Iterable[Group], length: int) -> Iterator[Window]:
  """Yields a window for each document: its first T + 1 tokens. A document of one token has no target and no window."""
  for document in itertools.chain.from_iterable(groups):
    pieces = pieces_of(document, length)
    if (first := next(pieces, None)) is not None:
      yield Window(first, np.zeros(0, np.int64))
    collections.deque(pieces, 0)  # the whole document is read, also the part that is not used


def pieces_of(document: np.ndarray | LongTokens, length: int) -> Iterator[np.ndarray]:
  """Yields the document in pieces of `length` + 1 tokens, of which the last one may be shorter. Neighbours overlap by
  one token, so that each token except the first is a target once. No piece of a document of one token."""
  rest = np.zeros(0, np.int32)
  for part in [document] if isinstance(document, np.ndarray) else document:
    rest = np.concatenate([rest, part]) if len(rest) else part
    place = 0
    while place + length < len(rest):
      yield rest[place : place + length + 1]
      place += length
    rest = rest[place:]
  if len(rest) > 1:
    yield rest


def example(window: Window, length: int) -> Example:
  """The window as an example of T = `length`. Documents become segments; a target in another document has weight 0."""
  tokens, targets, segment_ids, positions = np.zeros((4, length), np.int32)
  weights = np.zeros(length, np.float32)
  n = len(window.tokens) - 1
  tokens[:n], targets[:n] = ids(window)[:-1], ids(window)[1:]
  weights[:n] = window.tokens[1:] >= 0
  weights[window.starts - 1] = 0
  begins = window.starts[window.starts < n]
  segment_ids[begins] = 1
  segment_ids[:n] = np.cumsum(segment_ids[:n]) + 1
  index = np.arange(n, dtype=np.int32)
  positions[begins] = begins
  positions[:n] = index - np.maximum.accumulate(positions[:n])
  return Example(tokens, targets, weights, positions, segment_ids)


def ids(window: Window) -> np.ndarray:
  """The ids of the tokens [n + 1], int32."""
  return np.maximum(window.tokens, ~window.tokens)


def targets(window: Window) -> np.ndarray:
  """The ids of the targets that count in the loss."""
  found = np.delete(window.tokens[1:], window.starts - 1)
  return found[found >= 0]


def count_targets(window: Window) -> int:
  counted = np.count_nonzero(window.tokens[1:] >= 0) - np.count_nonzero(window.tokens[window.starts] >= 0)
  return int(counted)


def pack(window: Window, dtype: np.dtype) -> bytes:
  """The window as little-endian bytes: number of starts, starts (uint32), tokens (`dtype`)."""
  head = np.array([len(window.starts), *window.starts], "<u4")
  return head.tobytes() + window.tokens.astype(dtype).tobytes()


def unpack(data: bytes, dtype: np.dtype) -> Window:
  count = int(np.frombuffer(data, "<u4", count=1)[0])
  starts = np.frombuffer(data, "<u4", count=count, offset=4).astype(np.int64)
  return Window(np.frombuffer(data, dtype, offset=4 + 4 * count).astype(np.int32), starts)
