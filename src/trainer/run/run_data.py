"""The data of a run: training and evaluation loaders, the batch size, and how many tokens a step stands for."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from input_pipeline.loader import Loader, Split, make_loader, open_eval_sets
from input_pipeline.loader import check as check_data
from trainer.checkpoint import meta as checkpoint_meta
from trainer.checkpoint.checkpoint_errors import ConfigMismatch
from trainer.config import mixture_files
from trainer.config.errors import ConfigError
from trainer.config.mixture_files import EVAL_DATA
from trainer.config.schema import Config, listed
from trainer.world import World


@dataclasses.dataclass
class RunData:
  """What every attempt of a process trains and evaluates on."""

  train: Loader
  evaluations: dict[str, Loader]  # by the name of the set, in the order in which they are evaluated
  main_set: str  # the set whose loss is eval_loss; "" without evaluations
  global_batch_size: int  # examples per step, fixed for the life of the run
  tokens_per_step: int
  identity: dict[str, Any]  # which data, in what order: saved in checkpoints and compared by a resume
  steps: int  # of the whole run
  may_change: bool  # allow_config_change has "data"
  _tokens_offset: int = 0  # tokens of a step minus step * tokens_per_step: the batch size may have changed

  def identify(self, more: Mapping[str, Any], world: World) -> None:
    """Adds to what a resume compares. Raises ConfigError if the processes of a world have different identities."""
    self.identity = {**self.identity, **more}
    self.require_equal(world.gather(self.identity))

  def require_equal(self, others: Iterable[Mapping[str, Any]]) -> None:
    """Raises ConfigError if another process of the run, of which `others` are identities, has other data."""
    for other in others:
      if other != self.identity:
        raise ConfigError(
          f"The processes of this run have other data: {dict(other)} in another one, {self.identity} here.\nGive each "
          "process the same files, or the same elements of grain_dataset: which rows it reads is decided here."
        )

  def accept(self, config: Config, meta: Mapping[str, Any]) -> list[str]:
    """Lines that name the harmless differences between the run and a checkpoint with this `meta`. Raises ConfigMismatch
    if the run may not resume from it."""
    return checkpoint_meta.check_config(meta, config.flat(), self.identity, config.run.allow_config_change)

  def resume(self, step: int, meta: Mapping[str, Any] | None) -> list[str]:
    """The run continues after `step` with the next example. meta: of the restored state, whose cursor matters if the
    batch size or the data have changed; None: a fresh start. Returns lines for the log. Raises ConfigError if the data
    end too early."""
    same = meta is not None and meta["identity"].get("data") == self.identity["data"]
    lines = self.train.resume(step, meta and meta["cursor"], same=same)
    last = self.train.last_step()
    if last is not None and last < self.steps:
      raise ConfigError(
        f"steps={self.steps}: the sources of the mixture end after step {last}, because all have a limit of epochs. "
        "Raise epochs, or remove it from one source, or reduce steps."
      )
    self._tokens_offset = meta["tokens"] - step * self.tokens_per_step if meta is not None else 0
    # `lines` tell of a new order, which has other next examples.
    return lines or (self._compare_next(step, meta) if meta is not None and same else [])

  def _compare_next(self, step: int, meta: Mapping[str, Any]) -> list[str]:
    """A line for the log: whether the next examples are those that the checkpoint announces. If they differ and the
    data must not change, raises ConfigMismatch."""
    saved, found = meta["cursor"].get("next_examples", ""), self.train.next_examples(step)
    place = f"example {meta['cursor']['next_example']}"
    if not saved or not found:
      reason = "the checkpoint has no hash of them, or they cannot be read"
      return [f"Data: {place} is next. The next examples are not compared: {reason}."]
    if saved == found:
      return [f"Data: {place} is next. The data and the content of the next examples match the checkpoint."]
    difference = f"{place} and the examples after it differ from the checkpoint's ({saved} -> {found})"
    if self.may_change:
      return [f"Data: {difference}."]
    raise ConfigMismatch(
      f"{difference}, although the fingerprint is the same. The middle of a file has changed, or a dataset in Python "
      "gives other elements than before.\nRestore the files and delete the prepared data in dataset_cache_directory, "
      "or make an element depend on its index alone. If you want this change, set allow_config_change=data."
    )

  def tokens(self, step: int) -> int:
    """Tokens that the run has been trained on after `step`."""
    return self._tokens_offset + step * self.tokens_per_step

  def eval_batches(self, most: int) -> list[int]:
    """Number of batches of an evaluation of each set: `most`, or as many as the set has."""
    sizes = [loader.num_examples for loader in self.evaluations.values()]
    return [most if size is None else min(most, math.ceil(size / self.global_batch_size)) for size in sizes]

  def meta(self, config: Config, step: int) -> dict[str, Any]:
    """What a checkpoint of `step` holds besides the state."""
    cursor = self.train.cursor(step) | {"next_examples": self.train.next_examples(step)}
    return checkpoint_meta.build(tokens=self.tokens(step), cursor=cursor, config=config.flat(), identity=self.identity)


def check(config: Config) -> None:
  """Raises ConfigError for data of a wrong kind, as far as their first documents show it. Opens no run."""
  data = config.data
  if data.dataset_type == "synthetic":
    return
  found = [entry.options for entry in mixture_files.read(data)]
  if found and data.grain_eval_files:  # checked as files to train on: a mixture has no grain_train_files
    found.append(data.model_copy(update={"grain_train_files": data.grain_eval_files, "grain_eval_files": ""}))
  check_data([*(found or [data]), *mixture_files.read_eval_sets(data).values()], config.model.vocab_size)


def open_loader(
  config: Config, global_batch_size: int, split: Split, note: Callable[[str], None], source: Any = None
) -> Loader:
  """The loader of a split. source: see `open_data`. Raises ConfigError if the data cannot serve this configuration."""
  cfg, vocab_size = config.data, config.model.vocab_size
  return make_loader(
    cfg,
    vocab_size=vocab_size,
    global_batch_size=global_batch_size,
    split=split,
    mixture=mixture_files.read(cfg) if split == "train" and source is None else (),
    dataset=source if split == "train" else None,
    log=note,
  )


@contextlib.contextmanager
def open_data(
  config: Config, global_batch_size: int, note: Callable[[str], None], source: Any = None
) -> Iterator[RunData]:
  """Opens the data and closes it at the end. note: gets lines for the log. source: a grain.MapDataset or another object
  that is read by index, to train on in the place of the configuration's data. Raises ConfigError if the data cannot
  serve this configuration."""
  with contextlib.ExitStack() as stack:

    def load(split: Split) -> Loader:
      loader = open_loader(config, global_batch_size, split, note, source)
      stack.callback(loader.close)
      return loader

    train = load("train")
    evaluations = {EVAL_DATA: load("eval")} if _evaluates(config, train, note) else {}
    if config.observe.eval_steps > 0 and config.data.dataset_type != "synthetic":
      sets = open_eval_sets(
        config.data,
        mixture_files.read_eval_sets(config.data),
        vocab_size=config.model.vocab_size,
        global_batch_size=global_batch_size,
        tokenizer=train.tokenizer,
        log=note,
      )
      for loader in sets.values():
        stack.callback(loader.close)
      evaluations |= sets
    yield RunData(
      train,
      evaluations,
      next(iter(evaluations), ""),
      global_batch_size,
      global_batch_size * config.data.max_target_length,
      # Read once: a save must not depend on whether the data can be read at that time.
      {"data": train.fingerprint(), "global_batch_size": global_batch_size},
      config.run.steps,
      "data" in listed(config.run.allow_config_change),
    )


def _evaluates(config: Config, train: Loader, note: Callable[[str], None]) -> bool:
  """Whether the run evaluates data of other keys than eval_sets; by default if there is held-out text (not random)."""
  data, observe = config.data, config.observe
  if data.eval_sets and not (train.has_eval or data.names_eval_data):
    return False
  if observe.eval_steps == 0 or observe.eval_interval > 0 or data.names_eval_data:
    return observe.eval_steps > 0
  if not train.has_eval and data.dataset_type == "text":
    note(f"No evaluation: no text is held out (eval_fraction={data.eval_fraction:g}; a single line cannot be split).")
  return train.has_eval and data.dataset_type != "synthetic"
