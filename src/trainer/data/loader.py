"""From a configuration to batches by step: the only file here that knows all sources."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from trainer.data import text
from trainer.data.batch import Batch, DataError, empty_example, stack
from trainer.data.source import Source
from trainer.data.synthetic import SyntheticSource
from trainer.data.tokenizer import Tokenizer

if TYPE_CHECKING:
  from trainer.config.schema import DataSection  # pydantic is slow to import and not needed here

Split = Literal["train", "eval"]


class Loader:
  """Batches as a pure function of (step, row): row r of step s is example s * global_batch_size + r of the source.

  Thread safe. Holds no position: who reads which rows of which step, and in what order, changes nothing. Where the
  batch size has changed in mid-run (`resume`), steps count on from the example that came next.
  """

  def __init__(self, source: Source, *, global_batch_size: int, length: int, seed: int, reuse_first: bool) -> None:
    """`length` is T; `reuse_first` serves step 0's batch at every step."""
    self._source = source
    self._global_batch_size = global_batch_size
    self._empty = empty_example(length)
    self._seed = seed
    self._reuse_first = reuse_first
    self._offset = 0  # of a step's first example from step * global_batch_size

  @property
  def tokenizer(self) -> Tokenizer | None:
    """What made the tokens; None for synthetic data."""
    return self._source.tokenizer

  @property
  def num_examples(self) -> int | None:
    """Examples of one epoch; None: endless. Past it train data comes reshuffled, eval data is padding of weight 0."""
    return self._source.num_examples

  @property
  def has_eval(self) -> bool:
    """Whether the same data have an evaluation split: whether make_loader(split="eval") can serve."""
    return self._source.has_eval

  def resume(self, step: int, next_example: int) -> None:
    """Step `step` begins with example `next_example`. To be called before a thread reads."""
    self._offset = next_example - step * self._global_batch_size

  def batch(self, step: int, rows: np.ndarray | None = None) -> Batch:
    """The rows of step `step`'s global batch in the order given, or all of them.

    `rows` holds indices [B] into the global batch; -1 asks for a row of padding of weight 0. Raises DataError when an
    example cannot be read.
    """
    wanted = range(self._global_batch_size) if rows is None else [int(row) for row in rows]
    assert step >= 0 and all(-1 <= row < self._global_batch_size for row in wanted), (step, wanted)
    first = 0 if self._reuse_first else step * self._global_batch_size + self._offset
    try:
      return stack([self._empty if row < 0 else self._source.example(first + row) for row in wanted])
    except OSError as error:
      raise DataError(step, str(error)) from error

  def cursor(self, step: int) -> dict[str, Any]:
    """The position before step `step`, for a checkpoint: JSON, the same on every host and for any number of them."""
    next_example = step * self._global_batch_size + self._offset
    epoch = next_example // self.num_examples if self.num_examples else 0
    return {"next_example": next_example, "seed": self._seed, "epoch": epoch, "mixture": {}}

  def fingerprint(self) -> str:
    """Identity of the examples and their order: data, tokenizer, packing, seed (64 hex digits)."""
    order = f"{self._source.fingerprint()} reuse={self._reuse_first}"
    return hashlib.sha256(order.encode()).hexdigest()

  def unigram_entropy(self) -> float | None:
    """Entropy of the training targets' frequencies, nats per token: the training loss that counting can reach."""
    return self._source.unigram_entropy()

  def unigram_eval_loss(self) -> float | None:
    """Loss of the training frequencies (add-one smoothed) on the evaluation targets; None without evaluation data."""
    return self._source.unigram_eval_loss()

  def close(self) -> None:
    """Let go of open files. Idempotent."""
    self._source.close()


def make_loader(
  cfg: DataSection, *, vocab_size: int, global_batch_size: int, split: Split, log: Callable[[str], None] = print
) -> Loader:
  """The loader of a split. `vocab_size` is the model's V, which no token reaches.

  Tokenises the corpus first if its tokens are not cached, and tells `log` so. Raises ValueError when the data cannot
  serve: too little text, a tokenizer larger than V, no held-out text although `split` is eval.
  """
  assert global_batch_size >= 1, global_batch_size
  source: Source
  if cfg.dataset_type == "synthetic":
    stream = int(split == "eval")
    source = SyntheticSource(
      vocab_size=vocab_size, length=cfg.max_target_length, seed=cfg.data_shuffle_seed, stream=stream
    )
  else:
    min_examples = global_batch_size if split == "train" else 0
    source = text.open_source(cfg, vocab_size=vocab_size, min_examples=min_examples, split=split, log=log)
  return Loader(
    source,
    global_batch_size=global_batch_size,
    length=cfg.max_target_length,
    seed=cfg.data_shuffle_seed,
    reuse_first=split == "train" and cfg.reuse_example_batch > 0,
  )
