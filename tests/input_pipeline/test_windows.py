"""Packing: windows contain the stream exactly once; segments, positions and weights follow the documents."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from input_pipeline import windows

documents = st.lists(st.lists(st.integers(0, 70000), min_size=1, max_size=12), min_size=1, max_size=12)


def naive_examples(docs: list[list[int]], length: int) -> list[list[list[int]]]:
  """The oracle: a literal, token-by-token implementation of the definition."""
  stream = [(token, number, place) for number, doc in enumerate(docs) for place, token in enumerate(doc)]
  examples = []
  for first in range(0, len(stream) - 1, length):
    columns = []
    for k in range(first, first + length):
      if k + 1 >= len(stream):
        columns.append([0, 0, 0, 0, 0])
        continue
      (token, doc, place), (target, next_doc, _) = stream[k], stream[k + 1]
      columns.append([token, target, int(doc == next_doc), min(place, k - first), doc - stream[first][1] + 1])
    examples.append([list(field) for field in zip(*columns)])
  return examples


def arrays(docs: list[list[int]]) -> list[np.ndarray]:
  return [np.array(doc, np.int32) for doc in docs]


@settings(deadline=None)
@given(docs=documents, length=st.integers(1, 20), group=st.integers(1, 5))
def test_examples_equal_the_definition(docs, length, group):
  groups = [arrays(docs[i : i + group]) for i in range(0, len(docs), group)]
  made = [windows.example(window, length) for window in windows.split(groups, length)]
  assert [[field.tolist() for field in example] for example in made] == naive_examples(docs, length)


@settings(deadline=None)
@given(docs=documents, length=st.integers(1, 20))
def test_windows_give_the_stream_back(docs, length):
  cut = list(windows.split([arrays(docs)], length))
  stream = [token for doc in docs for token in doc]
  assert [token for window in cut for token in window.tokens[:-1].tolist()] + stream[-1:] == stream
  for left, right in itertools.pairwise(cut):
    assert left.tokens[-1] == right.tokens[0] and len(left.tokens) == length + 1


@pytest.mark.parametrize("groups", [[], [[]], [[np.array([3], np.int32)]], [[], [np.array([3], np.int32)], []]])
def test_a_stream_without_a_target_has_no_window(groups):
  assert list(windows.split(groups, 4)) == []
