"""Packing of whole documents by best fit: a document goes to the window with the least space in which it fits.

A document is cut only if it is longer than a window. Documents are packed in rounds of bounded size, so that memory is
bounded and a window depends only on the documents near it. In a round the longest documents come first.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from input_pipeline.windows import Group, Window, pieces_of

_ROUND = 2**22  # tokens of a round


def pack(groups: Iterable[Group], length: int) -> Iterator[Window]:
  """Yields windows of at most T = `length` inputs.

  Each token of a document except its first is a target exactly once. Neighbouring parts of a document that is longer
  than T + 1 overlap by one token.
  """
  pieces: list[np.ndarray] = []
  size = 0
  for document in itertools.chain.from_iterable(groups):
    for piece in pieces_of(document, length):
      size += len(piece)
      if len(piece) > length:  # a full window: the longest pieces of a round come first
        yield Window(piece, np.zeros(0, np.int64))
      else:
        pieces.append(piece)
    if size >= max(_ROUND, 64 * length):
      yield from pack_round(pieces, length + 1)
      pieces, size = [], 0
  yield from pack_round(pieces, length + 1)


def pack_round(pieces: Sequence[np.ndarray], capacity: int) -> Iterator[Window]:
  """Yields windows of at most `capacity` tokens with all pieces, each of at most `capacity` tokens."""
  bins: list[list[int]] = []
  open_bins: defaultdict[int, list[int]] = defaultdict(list)  # by the tokens that still fit
  spaces: list[int] = []  # the keys of open_bins, ascending
  for number in sorted(range(len(pieces)), key=lambda number: -len(pieces[number])):
    needed = len(pieces[number])
    found = bisect_left(spaces, needed)
    if found == len(spaces):
      chosen, space = len(bins), capacity
      bins.append([])
    else:
      space = spaces[found]
      chosen = open_bins[space].pop()
      if not open_bins[space]:
        del open_bins[space], spaces[found]
    bins[chosen].append(number)
    if (left := space - needed) >= 2:  # a document of one token has no target
      if left not in open_bins:
        insort(spaces, left)
      open_bins[left].append(chosen)
  for numbers in bins:
    members = [pieces[number] for number in sorted(numbers)]
    yield Window(np.concatenate(members), np.cumsum([len(member) for member in members])[:-1])
