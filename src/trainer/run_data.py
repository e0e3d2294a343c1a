"""The data of a run: training and evaluation loaders, the batch size, and how many tokens a step stands for."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trainer.checkpoint import meta as checkpoint_meta
from trainer.config.schema import Config
from trainer.data import Loader, make_loader, prepared
from trainer.data.loader import Split


@dataclasses.dataclass
class RunData:
  """What every attempt of a process trains and evaluates on."""

  train: Loader
  evaluation: Loader | None
  global_batch_size: int  # examples per step, fixed for the life of the run
  tokens_per_step: int
  identity: dict[str, Any]  # which data, in what order: saved in checkpoints and compared by a resume
  _tokens_offset: int = 0  # tokens of a step minus step * tokens_per_step: the batch size may have changed

  def resume(self, step: int, meta: Mapping[str, Any] | None) -> None:
    """The run continues after `step` with the next example. meta: of the restored state; None: a fresh start.

    The cursor in `meta` matters if the batch size has changed. Examples of other data have other numbers.
    """
    next_example = step * self.global_batch_size
    if meta is not None and meta["identity"].get("data") == self.identity["data"]:
      next_example = meta["cursor"]["next_example"]
    self.train.resume(step, next_example)
    self._tokens_offset = meta["tokens"] - step * self.tokens_per_step if meta is not None else 0

  def tokens(self, step: int) -> int:
    """Tokens that the run has been trained on after `step`."""
    return self._tokens_offset + step * self.tokens_per_step

  def eval_batches(self, most: int) -> int:
    """Number of batches of one evaluation: `most`, or as many as the evaluation split has."""
    assert self.evaluation is not None, "no evaluation data"
    examples = self.evaluation.num_examples
    return most if examples is None else min(most, math.ceil(examples / self.global_batch_size))

  def meta(self, config: Config, step: int) -> dict[str, Any]:
    """What a checkpoint of `step` holds besides the state."""
    return checkpoint_meta.build(
      tokens=self.tokens(step), cursor=self.train.cursor(step), config=config.flat(), identity=self.identity
    )


def check(config: Config) -> None:
  """Raises ConfigError for data of a wrong kind. Reads little, and touches no device."""
  if config.data.dataset_type != "synthetic":
    prepared.check(config.data, config.model.vocab_size)


@contextlib.contextmanager
def open_data(config: Config, global_batch_size: int, note: Callable[[str], None]) -> Iterator[RunData]:
  """Opens the data and closes it at the end. `note` receives lines for the log.

  Raises ConfigError if the data cannot serve this configuration.
  """
  with contextlib.ExitStack() as stack:

    def load(split: Split) -> Loader:
      vocab_size = config.model.vocab_size
      loader = make_loader(
        config.data, vocab_size=vocab_size, global_batch_size=global_batch_size, split=split, log=note
      )
      stack.callback(loader.close)
      return loader

    train = load("train")
    yield RunData(
      train,
      load("eval") if _evaluates(config, train, note) else None,
      global_batch_size,
      global_batch_size * config.data.max_target_length,
      # Read once: a save must not depend on whether the data can be read at that time.
      {"data": train.fingerprint(), "global_batch_size": global_batch_size},
    )


def _evaluates(config: Config, train: Loader, note: Callable[[str], None]) -> bool:
  """Whether the run evaluates. By default it does if there is held-out text; random tokens teach nothing."""
  data, observe = config.data, config.observe
  if observe.eval_steps == 0 or observe.eval_interval > 0 or data.names_eval_data:
    return observe.eval_steps > 0
  if not train.has_eval and data.dataset_type == "text":
    note(f"No evaluation: no text is held out (eval_fraction={data.eval_fraction:g}; a single line cannot be split).")
  return train.has_eval and data.dataset_type != "synthetic"
