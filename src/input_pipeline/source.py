"""The protocol of a source of examples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from input_pipeline.batch import Example
from input_pipeline.tokenizer import Tokenizer


class Source(Protocol):
  """An ordered sequence of examples. Example i depends only on the source's arguments and i, not on hosts or history.

  A new format of files is not a new source: it is a function that reads documents (`documents.py`). A subclass needs
  only `name`, `example` and `fingerprint`: then it is endless, and its tokens are not text.
  """

  name: str
  """Where the examples come from, for the log."""
  num_examples: int | None = None
  """Examples of one epoch. None: endless, and no example repeats."""
  num_targets: int | None = None
  """Tokens of one epoch that count in the loss. None: endless."""
  has_eval: bool = False
  """Whether the same data have an evaluation split."""
  bad_records: int = 0
  """Records of the data that are skipped because they are damaged or have no document."""
  tokenizer: Tokenizer | None = None
  """The tokenizer that made the tokens. None when they are not text."""

  def example(self, index: int) -> Example:
    """The example of global index `index` >= 0. Raises OSError, naming the file, when it cannot be read."""
    ...

  def examples(self, indices: Sequence[int]) -> list[Example]:
    return [self.example(index) for index in indices]

  def fingerprint(self) -> str:
    """Identity of the examples and their order: equal if and only if `example` is the same function."""
    ...

  def unigram_entropy(self) -> float | None:
    """Entropy of the frequencies of the training targets, nats per token. None when unknown."""
    return None

  def unigram_eval_loss(self) -> float | None:
    """Loss of the training frequencies on the evaluation targets, nats per token. None when unknown."""
    return None

  def close(self) -> None:
    """Closes open files. Idempotent."""
    return
