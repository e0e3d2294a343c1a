"""Random tokens. Each example is computed from its index, without files or heavy imports."""

from __future__ import annotations

import numpy as np

from input_pipeline.batch import Example
from input_pipeline.source import Source

_MASK = 2**64 - 1


class SyntheticSource(Source):
  """Uniform random tokens in [0, vocab_size) from a counter-based generator keyed by (seed, index)."""

  name = "random tokens"
  has_eval = True

  def __init__(self, *, vocab_size: int, length: int, seed: int, stream: int) -> None:
    """`length` is T. Another `stream` (0, 1, ..) with the same seed gives other examples (train and eval)."""
    self._vocab_size = vocab_size
    self._length = length
    self._seed = seed
    self._stream = stream
    self._ones = np.ones(length, np.float32)
    self._segment_ids = np.ones(length, np.int32)
    self._positions = np.arange(length, dtype=np.int32)

  def example(self, index: int) -> Example:
    """One document of T + 1 random tokens without padding."""
    # Philox words are the same in all NumPy versions; Generator.integers does not guarantee that.
    generator = np.random.Philox(key=np.array([self._seed & _MASK, index], np.uint64), counter=[0, 0, 0, self._stream])
    words = generator.random_raw(self._length + 1) >> np.uint64(32)
    tokens = (words * np.uint64(self._vocab_size) >> np.uint64(32)).astype(np.int32)
    return Example(tokens[:-1], tokens[1:], self._ones, self._positions, self._segment_ids)

  def fingerprint(self) -> str:
    return f"synthetic-1 vocab={self._vocab_size} length={self._length} seed={self._seed} stream={self._stream}"
