"""The protocol of everything that examples come from."""

from __future__ import annotations

from typing import Protocol

from trainer.data.batch import Example
from trainer.data.tokenizer import Tokenizer


class Source(Protocol):
  """An order of examples. Example i is a pure function of the source's arguments and i: of no host count, no history.

  Whoever adds a source (a mixture, TFDS, another packing) needs only this; the loader and the trainer stay as they are.
  """

  num_examples: int | None
  """Examples of one epoch; None: endless, every example fresh."""

  has_eval: bool
  """Whether the same data have an evaluation split."""

  tokenizer: Tokenizer | None
  """What made the tokens; None when they are no text."""

  def example(self, index: int) -> Example:
    """The example of global index `index` >= 0. Raises OSError, naming the file, when it cannot be read."""
    ...

  def fingerprint(self) -> str:
    """Identity of the examples and of their order: equal exactly when `example` is the same function."""
    ...

  def unigram_entropy(self) -> float | None:
    """Entropy of the targets' frequencies, nats per token; None when unknown."""
    ...

  def unigram_eval_loss(self) -> float | None:
    """Loss on the evaluation targets of a model that knows only the training frequencies, nats per token."""
    ...

  def close(self) -> None:
    """Let go of open files. Idempotent."""
    ...
