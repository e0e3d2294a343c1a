"""Windows: T + 1 tokens of one or more documents, and the example that a window stands for.

With packing=split, documents are joined into a stream, which is cut into windows. Neighbouring windows overlap by one
token, so that each token of the stream except the first is the target of exactly one position of exactly one window.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from input_pipeline.batch import Example


class Window(NamedTuple):
  """Parts of documents: n + 1 tokens, 1 <= n <= T."""

  tokens: np.ndarray  # [n + 1] int32: the id, or ~id where it does not count in the loss
  starts: np.ndarray  # [boundaries] int64: offsets in 1..n at which a document begins, ascending


def split(groups: Iterable[Sequence[np.ndarray]], length: int) -> Iterator[Window]:
  """Yields the windows of T = `length` inputs of all documents joined. A group is a list of non-empty documents."""
  rest, rest_starts = np.zeros(0, np.int32), np.zeros(0, np.int64)
  for group in groups:
    lengths = [len(rest)] + [len(document) for document in group]
    starts = np.concatenate([rest_starts, np.cumsum(lengths)[:-1]])
    stream = np.concatenate([rest, *group])
    place = 0
    while place + length < len(stream):
      first, last = np.searchsorted(starts, [place, place + length], side="right")
      yield Window(stream[place : place + length + 1], starts[first:last] - place)
      place += length
    rest, rest_starts = stream[place:], starts[starts > place] - place
  if len(rest) > 1:
    yield Window(rest, rest_starts)


def single(groups: Iterable[Sequence[np.ndarray]], length: int) -> Iterator[Window]:
  """Yields a window for each document: its first T + 1 tokens. A document of one token has no target and no window."""
  for group in groups:
    for document in group:
      if len(document) > 1:
        yield Window(document[: length + 1], np.zeros(0, np.int64))


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
  """The number of `targets`."""
  counted = np.count_nonzero(window.tokens[1:] >= 0) - np.count_nonzero(window.tokens[window.starts] >= 0)
  return int(counted)


def pack(window: Window, dtype: np.dtype) -> bytes:
  """The window as little-endian bytes: number of starts, starts (uint32), tokens (`dtype`)."""
  head = np.array([len(window.starts), *window.starts], "<u4")
  return head.tobytes() + window.tokens.astype(dtype).tobytes()


def unpack(data: bytes, dtype: np.dtype) -> Window:
  """The inverse of `pack`."""
  count = int(np.frombuffer(data, "<u4", count=1)[0])
  starts = np.frombuffer(data, "<u4", count=count, offset=4).astype(np.int64)
  return Window(np.frombuffer(data, dtype, offset=4 + 4 * count).astype(np.int32), starts)
