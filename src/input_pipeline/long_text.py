"""The token ids of a text of any length, in the memory of a few windows of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
  import tokenizers

# Characters.
_WINDOW = 62_500
_AT_ONCE = 4  # windows, on several cores: about 60 MB of memory
_MARGIN = 1024  # more than the longest token and what a rule looks at: ids nearer to an edge may depend on the edge


class _Window(NamedTuple):
  """The tokens of a part of the text, with their places in the whole text."""

  begin: int
  end: int
  ids: np.ndarray
  starts: np.ndarray
  ends: np.ndarray


def encode(tokenizer: tokenizers.Tokenizer, parts: Iterable[str]) -> Iterator[np.ndarray]:
  """Yields the ids of a text that comes in parts, int32, without special tokens: together they are the ids that the
  library gives for the text as a whole.

  Neighbouring windows overlap by four margins, and are joined in the middle if the two middle margins have the same
  tokens in both. A BPE then has the same tokens in the whole text: each token there has become what it is from its own
  characters, so it does the same with the left window before it and the right window after it. If the tokens differ (a
  run of digits that are taken in threes, one unknown word), both windows are encoded again as one; a text with such a
  run needs the memory of the run.
  """
  text = _Text(parts)
  left, first, least = None, 0, 0
  for right in _windows(tokenizer, text):
    if left is None:
      left = right
    elif seam := _seam(left, right):
      yield left.ids[first : seam[0]]
      left, first, least = right, seam[1], 0
      text.forget(left.begin)
    elif right.end >= least or text.ends_at(right.end):
      (left,) = _encoded(tokenizer, text, [(left.begin, right.end)])
      least = 2 * left.end - left.begin  # twice as long before the next try, so that the time stays linear
  if left is not None:
    yield left.ids[first:]


class _Text:
  """The part of a text between two places, of which the last one moves on as parts are read."""

  def __init__(self, parts: Iterable[str]) -> None:
    self._parts = iter(parts)
    self._begin, self._known = 0, ""

  def read_to(self, end: int) -> int:
    """Reads up to `end`, if the text is so long. Returns the end of what has been read, at most `end`."""
    more = []
    missing = end - self._begin - len(self._known)
    while missing > 0 and (part := next(self._parts, None)) is not None:
      more.append(part)
      missing -= len(part)
    self._known = "".join([self._known, *more])
    return min(end, self._begin + len(self._known))

  def ends_at(self, place: int) -> bool:
    """Whether the text has nothing from `place` on."""
    return self.read_to(place + 1) <= place

  def between(self, begin: int, end: int) -> str:
    return self._known[begin - self._begin : end - self._begin]

  def forget(self, end: int) -> None:
    """Gives back the memory of what is before `end`."""
    self._begin, self._known = end, self.between(end, self._begin + len(self._known))


def _windows(tokenizer: tokenizers.Tokenizer, text: _Text) -> Iterator[_Window]:
  at = 0
  while not text.ends_at(at):
    some: list[tuple[int, int]] = []
    while len(some) < _AT_ONCE and not text.ends_at(at):
      some.append((max(0, at - 4 * _MARGIN), text.read_to(at + _WINDOW)))
      at += _WINDOW
    yield from _encoded(tokenizer, text, some)


def _encoded(tokenizer: tokenizers.Tokenizer, text: _Text, spans: Sequence[tuple[int, int]]) -> Iterator[_Window]:
  encodings = tokenizer.encode_batch([text.between(begin, end) for begin, end in spans], add_special_tokens=False)
  for (begin, end), encoding in zip(spans, encodings, strict=True):
    places = np.array(encoding.offsets, np.int64).reshape(-1, 2) + begin
    yield _Window(begin, end, np.array(encoding.ids, np.int32), *places.T)


def _seam(left: _Window, right: _Window) -> tuple[int, int] | None:
  """(i, j): the text has the tokens of `left` before i, then those of `right` from j on. None if they do not agree."""
  middle = right.begin + _MARGIN, left.end - _MARGIN
  (i, i_end), (j, j_end) = np.searchsorted(left.starts, middle), np.searchsorted(right.starts, middle)
  same = all(np.array_equal(a[i:i_end], b[j:j_end]) for a, b in zip(left[2:], right[2:]))
  if i_end - i < 2 or not same:
    return None
  half = (i_end - i) // 2
  return int(i + half), int(j + half)
