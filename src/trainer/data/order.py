"""The order in which the records of a split become examples."""

from __future__ import annotations

import functools
import hashlib
from typing import Any, Generic, Protocol, TypeVar

_PROBED = 8

Record = TypeVar("Record", covariant=True)  # bytes or an array


class Records(Protocol[Record]):
  """Records by number, from any thread. Reading raises OSError, naming record and file."""

  def __len__(self) -> int: ...

  def __getitem__(self, number: int) -> Record: ...


class Order(Generic[Record]):
  """Records by example index. Training: endless, reshuffled each epoch. Evaluation: one fixed order, then no records.

  The order comes from grain, whose `shuffle` computes a permutation per epoch, one index at a time.
  """

  def __init__(self, records: Records[Record], *, split: str, seed: int) -> None:
    self._records = records
    self._split = split
    # A fixed seed for evaluation keeps runs comparable. Our seeds are any integers, and grain needs 32 bits.
    self._seed = int(hashlib.sha256(str(seed).encode()).hexdigest()[:8], 16) if split == "train" else 0
    # Import here, not at first use in the prefetch thread: the main thread may be importing the same modules then.
    import grain

    ordered: Any = grain.MapDataset.source(records).shuffle(seed=self._seed)
    self._ordered = ordered.repeat() if split == "train" else ordered

  def record(self, index: int) -> Record | None:
    """The record of example `index`; None after the end of evaluation data."""
    return None if self._split == "eval" and index >= len(self._records) else self._ordered[index]

  @functools.cached_property
  def fingerprint(self) -> str:
    """Identity of the order. The first records in it detect a version of grain that shuffles differently."""
    probe = hashlib.sha256()
    for index in range(min(_PROBED, len(self._records))):
      probe.update(self._ordered[index])
    return f"split={self._split} seed={self._seed} first={probe.hexdigest()}"
