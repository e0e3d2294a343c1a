"""The order in which the records of a split become examples: `permuted` with a key of the seed and the source."""

from __future__ import annotations

import functools
import hashlib
import json
import math
from typing import Any, Protocol

import numpy as np
from numpy.random import Philox  # here, because NumPy would import it at its first use, in the prefetch thread

from input_pipeline.windows import Window

_BLOCK = 256  # places that are computed together: 1 us each, and 200 us for one alone
_ROUNDS = 12


class Records(Protocol):
  """Records by number, from any thread. Reading raises OSError, naming record and file."""

  def __len__(self) -> int: ...

  def __getitem__(self, number: int) -> bytes: ...


class Order:
  """Records by example index. Training: endless, reshuffled each epoch. Evaluation: one order, then no records."""

  def __init__(self, records: Records, *, split: str, seed: int, source: str) -> None:
    """source: identity of the examples, whatever their files and their name are."""
    self._records = records
    self._split = split
    self._seed = seed
    # One block for the thread that prepares batches, others for a look at the next examples.
    self._block = functools.lru_cache(maxsize=4)(self._compute_block)
    self.set_source(source)

  def __reduce__(self) -> tuple[Any, ...]:
    keys: dict[str, Any] = {"split": self._split, "seed": self._seed, "source": self.source}
    return functools.partial(Order, self._records, **keys), ()  # in another process without the cache of blocks

  def set_source(self, source: str) -> None:
    """Makes the order that of another source: records that begin with equal examples need different orders."""
    self.source = source
    self._block.cache_clear()
    is_training = self._split == "train"
    # A fixed key for evaluation keeps runs with different seeds comparable.
    key = hashlib.sha256(f"{self._seed} {source}".encode()).digest() if is_training else bytes(8)
    self.fingerprint = f"split={self._split} key={key[:8].hex()}"
    """Identity of the order."""
    self._key = int.from_bytes(key[:8])

  def record(self, index: int) -> bytes | None:
    """The record of example `index`; None after the end of evaluation data."""
    if self._split == "eval" and index >= len(self._records):
      return None
    epoch, place = divmod(index, len(self._records))
    return self._records[int(self._block(epoch, place // _BLOCK)[place % _BLOCK])]

  def _compute_block(self, epoch: int, block: int) -> np.ndarray:
    """The numbers of the records at the places of a block [<= _BLOCK]."""
    size = len(self._records)
    places = np.arange(block * _BLOCK, min(size, (block + 1) * _BLOCK), dtype=np.uint64)
    return permuted(places, size, seed=self._key, epoch=epoch)


def identity(count: int, first: Window) -> str:
  """Identity of `count` examples, of which `first` is the first one in the files: 64 hex digits.

  It is the same for every format of the files, and does not need to read them all.
  """
  content = json.dumps([count, first.tokens.tolist(), first.starts.tolist()])
  return hashlib.sha256(content.encode()).hexdigest()


def permuted(places: np.ndarray, size: int, *, seed: int, epoch: int) -> np.ndarray:
  """The images of `places`, all below `size`, under a pseudorandom permutation of range(size): [n] uint64.

  A Feistel network over pairs of numbers (Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002): the pairs
  are a little more than `size`, and an image that is not below `size` is permuted again. The permutations of each
  `seed` and `epoch`, of 64 bits, are independent.
  """
  keys = Philox(key=np.array([seed, epoch], np.uint64)).random_raw(_ROUNDS)
  rows = math.isqrt(size - 1) + 1
  columns = -(-size // rows)
  images = places.astype(np.uint64)
  wanted = np.arange(len(images))
  while len(wanted):
    row, column = np.divmod(images[wanted], columns)
    for even, odd in keys.reshape(-1, 2):
      row = (row + _hash(column + even)) % rows
      column = (column + _hash(row + odd)) % columns
    images[wanted] = row * columns + column
    wanted = wanted[images[wanted] >= size]
  return images


def _hash(x: np.ndarray) -> np.ndarray:
  """A hash of 63 bits of each uint64: the finalizer of splitmix64."""
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB
  return (x ^ (x >> 31)) >> 1
