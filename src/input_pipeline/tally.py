"""Numbers of a batch that add up: each process counts the rows that it reads, and the sum does not depend on who read
which rows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import astuple, dataclass

import numpy as np

from input_pipeline.batch import Batch

_BYTES = 16  # of each number
_UNIT = 2**40  # weights are counted in whole numbers of 1 / _UNIT, so that their sum has no rounding


@dataclass(frozen=True)
class Tally:
  """Sums over some rows of a global batch.

  digest: of a SHA-256 of each row together with its number in the batch, modulo 2^128; 0 where nothing was hashed.
  weight: of the targets, times 2^40. tokens: how many are no padding.
  """

  digest: int = 0
  weight: int = 0
  tokens: int = 0

  SIZE = 3 * _BYTES
  """Length of `numbers`."""

  def __add__(self, other: Tally) -> Tally:
    return Tally((self.digest + other.digest) % 2**128, self.weight + other.weight, self.tokens + other.tokens)

  @property
  def numbers(self) -> np.ndarray:
    """float32 [SIZE], bytes. Up to 65,536 such arrays can be added in float32 without rounding, in any order."""
    return np.frombuffer(b"".join(one.to_bytes(_BYTES, "little") for one in astuple(self)), np.uint8).astype(np.float32)

  @classmethod
  def of_sum(cls, numbers: np.ndarray) -> Tally:
    digest, *counts = (
      sum(int(number) << 8 * place for place, number in enumerate(part)) for part in numbers.reshape(3, _BYTES)
    )
    return cls(digest % 2**128, *counts)

  @property
  def hex(self) -> str:
    return f"{self.digest:032x}"

  @property
  def mean_weight(self) -> float:
    """The sum of the weights, divided by the number of tokens that are not padding."""
    return self.weight / _UNIT / max(self.tokens, 1)


def of_rows(rows: Iterable[int], batch: Batch, *, hashes: bool) -> Tally:
  """The tally of a batch whose rows have the numbers `rows` in the global batch; -1: padding that does not count.

  hashes: whether the digest is wanted, which takes longer than the rest.
  """
  digest, weight, tokens = 0, 0, 0
  for row, *fields in zip(rows, *batch, strict=True):
    if row < 0:
      continue
    if hashes:
      content = hashlib.sha256(int(row).to_bytes(8, "big"))
      for field in fields:
        content.update(np.ascontiguousarray(field))
      digest += int.from_bytes(content.digest()[:16], "big")
    _, _, weights, _, segment_ids = fields
    weight += round(float(weights.sum(dtype=np.float64)) * _UNIT)
    tokens += int(np.count_nonzero(segment_ids))
  return Tally(digest % 2**128, weight, tokens)
