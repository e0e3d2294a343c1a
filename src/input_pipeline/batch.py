"""Types: a training example, a batch of examples, and the error raised when a batch cannot be made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Example(NamedTuple):
  """One packed window of T tokens: the fields of `Batch` without the leading dim B."""

  tokens: np.ndarray  # [T] int32
  targets: np.ndarray  # [T] int32: the token that follows
  weights: np.ndarray  # [T] float32: 1 where the target counts in the loss, else 0
  positions: np.ndarray  # [T] int32: index inside the document's part of this window
  segment_ids: np.ndarray  # [T] int32: 1, 2, .. for the documents of the window in order, 0 for padding


class Batch(NamedTuple):
  """B packed windows: inputs and targets of one step.

  Attention must not cross segments. Segment 0 is padding; its tokens, targets, positions and weights are 0.
  """

  tokens: np.ndarray  # [B, T] int32
  targets: np.ndarray  # [B, T] int32
  weights: np.ndarray  # [B, T] float32
  positions: np.ndarray  # [B, T] int32
  segment_ids: np.ndarray  # [B, T] int32


class DataError(RuntimeError):
  """The batch of a step could not be made; the original exception is the __cause__.

  Not a ValueError: the user's input was accepted earlier, so this failure (a damaged file, a full disk) needs a
  traceback.
  """

  def __init__(self, step: int, detail: str) -> None:
    super().__init__(f"step {step}: {detail}")
    self.step = step


def empty_example(length: int) -> Example:
  """An example of `length` tokens that is all padding, with weight 0."""
  zeros = np.zeros(length, np.int32)
  return Example(zeros, zeros, np.zeros(length, np.float32), zeros, zeros)


def stack(examples: Sequence[Example]) -> Batch:
  """A batch with the examples as rows. `examples` has at least one, and all have the same length."""
  return Batch(*(np.stack(field) for field in zip(*examples)))
