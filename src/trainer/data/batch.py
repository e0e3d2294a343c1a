"""What a training example and a batch of them are, and the error of a batch that could not be made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Example(NamedTuple):
  """One packed window of T tokens; the fields of `Batch` without the leading B."""

  tokens: np.ndarray  # [T] int32
  targets: np.ndarray  # [T] int32: the token that follows
  weights: np.ndarray  # [T] float32: 1 where the target counts in the loss, else 0
  positions: np.ndarray  # [T] int32: index inside the document's part of this window
  segment_ids: np.ndarray  # [T] int32: 1.. for the documents of the window in order, 0 for padding


class Batch(NamedTuple):
  """B packed windows: inputs and targets of one step.

  Tokens of different segments must not see each other; segment 0 is padding, with token, target, position and weight 0.
  """

  tokens: np.ndarray  # [B, T] int32
  targets: np.ndarray  # [B, T] int32
  weights: np.ndarray  # [B, T] float32
  positions: np.ndarray  # [B, T] int32
  segment_ids: np.ndarray  # [B, T] int32


class DataError(RuntimeError):
  """A batch could not be made in the middle of a run; the original exception is the __cause__.

  Not a ValueError: the user's input was accepted earlier, and what failed now (a damaged file, a full disk) needs a
  traceback.
  """

  def __init__(self, step: int, detail: str) -> None:
    super().__init__(f"step {step}: {detail}")
    self.step = step
    self.detail = detail


def empty_example(length: int) -> Example:
  """An example of `length` tokens that is all padding and weighs nothing."""
  zeros = np.zeros(length, np.int32)
  return Example(zeros, zeros, np.zeros(length, np.float32), zeros, zeros)


def stack(examples: Sequence[Example]) -> Batch:
  """The examples, at least one and all of one length, as the rows of a batch."""
  return Batch(*(np.stack(field) for field in zip(*examples)))
