"""The token ids of a text of any length, in the memory of a few windows of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
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


def encode(tokenizer: tokenizers.Tokenizer, text: str) -> np.ndarray:
  """The ids of `text`, int32, without special tokens: the ids that the library gives for the text as a whole.

  Neighbouring windows overlap by four margins, and are joined in the middle if the two middle margins have the same
  tokens in both. A BPE then has the same tokens in the whole text: each token there has become what it is from its own
  characters, so it does the same with the left window before it and the right window after it. If the tokens differ (a
  run of digits that are taken in threes, one unknown word), both windows are encoded again as one; a text with such a
  run needs the memory of the run.
  """
  parts: list[np.ndarray] = []
  left, first, least = None, 0, 0
  for right in _windows(tokenizer, text):
    if left is None:
      left = right
    elif seam := _seam(left, right):
      parts.append(left.ids[first : seam[0]])
      left, first, least = right, seam[1], 0
    elif right.end >= min(least, len(text)):
      (left,) = _encoded(tokenizer, text, [(left.begin, right.end)])
      least = 2 * left.end - left.begin  # twice as long before the next try, so that the time stays linear
  assert left is not None, "the text has a window"
  return np.concatenate([*parts, left.ids[first:]])


def _windows(tokenizer: tokenizers.Tokenizer, text: str) -> Iterator[_Window]:
  spans = ((max(0, at - 4 * _MARGIN), min(at + _WINDOW, len(text))) for at in range(0, len(text), _WINDOW))
  while some := list(itertools.islice(spans, _AT_ONCE)):
    yield from _encoded(tokenizer, text, some)


def _encoded(tokenizer: tokenizers.Tokenizer, text: str, spans: Sequence[tuple[int, int]]) -> Iterator[_Window]:
  encodings = tokenizer.encode_batch([text[begin:end] for begin, end in spans], add_special_tokens=False)
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
