"""Batches by step from a configuration. The only file that knows all sources."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np

from input_pipeline import datasets, elements, in_place, prepared, tally, workers
from input_pipeline.batch import Batch, DataError, empty_example, stack
from input_pipeline.documents import Documents
from input_pipeline.input_errors import ConfigError
from input_pipeline.mixture import Member, MixtureSource, Steps, short
from input_pipeline.source import Source
from input_pipeline.synthetic import SyntheticSource
from input_pipeline.tally import Tally
from input_pipeline.tokenizer import Tokenizer, ends

if TYPE_CHECKING:
  import grain

  from input_pipeline.options import DataOptions, MixtureEntry  # pydantic is slow to import and not needed here

Split = Literal["train", "eval"]
_Opened: TypeAlias = prepared.PreparedSource | in_place.InPlaceSource | elements.ElementsSource
_NEXT = 4  # examples that a checkpoint has a hash of
_SHOWN = 20  # tokens


class Loader:
  """Batches as a pure function of (step, row): row r of step s is example s * global_batch_size + r of the source.

  Thread safe and without a position: rows and steps can be read by any process in any order. If the batch size
  changed during the run, `resume` makes the steps continue with the next example.
  """

  def __init__(self, source: Source, cfg: DataOptions, global_batch_size: int, split: Split) -> None:
    """cfg: gives T and the seed, and may make every training step get the batch of step 0."""
    self._source = source
    self._mixture = source if isinstance(source, MixtureSource) else None
    self._global_batch_size = global_batch_size
    self._length = cfg.max_target_length
    self._empty = empty_example(self._length)
    self._seed = cfg.data_shuffle_seed
    self._reuse_first = split == "train" and cfg.reuse_example_batch > 0
    self._offset = 0  # of a step's first example, relative to step * global_batch_size
    self._id = short(source.fingerprint())
    self._read: dict[str, int] = {}  # examples of each source that were read before the resume

  @property
  def tokenizer(self) -> Tokenizer | None:
    """The tokenizer that made the tokens; None for data without text."""
    return self._source.tokenizer

  @property
  def num_examples(self) -> int | None:
    """Examples of one epoch; None: endless. After them, train data is reshuffled and eval data is padding."""
    return self._source.num_examples

  @property
  def has_eval(self) -> bool:
    """Whether the data have an evaluation split, so that make_loader(split="eval") works."""
    return self._source.has_eval

  def resume(self, step: int, cursor: Mapping[str, Any] | None, *, same: bool) -> list[str]:
    """Makes step `step` begin with the next example. Call it before a thread reads. Returns lines for the log.

    cursor: of the checkpoint; None: a fresh start. same: the checkpoint is of the same data. With other data, each
    source that the run has read continues after its last example, alone or in a mixture.
    """
    cursor = cursor or {}
    mixture = cursor.get("mixture", {})
    self._read = cursor.get("sources", {})
    next_example = step * self._global_batch_size
    lines: list[str] = []
    if same or (cursor and self._mixture):
      next_example = cursor["next_example"]
    elif self._id in self._read:
      next_example = self._read[self._id]
      lines = [f"Data: {self._source.name} continues at its example {next_example}."]
    self._offset = next_example - step * self._global_batch_size
    if self._mixture:
      steps = Steps(self._global_batch_size, self._offset)
      lines = self._mixture.resume(next_example, mixture, self._read, steps, same=same)
    return lines

  def last_step(self) -> int | None:
    """The last step that has a whole batch; None: there is no last one. A mixture with limits of epochs ends."""
    if self._mixture is None or self._mixture.limit is None:
      return None
    return (self._mixture.limit - self._offset) // self._global_batch_size

  def examples_by_source(self, step: int) -> dict[str, int]:
    """Examples of each source of a mixture that the run has been trained on after `step`; {} for other data."""
    return self._mixture.counts(step * self._global_batch_size + self._offset) if self._mixture else {}

  def batch(self, step: int, rows: np.ndarray | None = None) -> Batch:
    """The given rows of the global batch of `step`, or all rows.

    `rows` [B] are indices into the global batch; -1 gives a row of padding with weight 0. Raises DataError if an
    example cannot be read.
    """
    wanted = range(self._global_batch_size) if rows is None else [int(row) for row in rows]
    assert step >= 0 and all(-1 <= row < self._global_batch_size for row in wanted), (step, wanted)
    first = 0 if self._reuse_first else step * self._global_batch_size + self._offset
    try:
      found = iter(self._source.examples([first + row for row in wanted if row >= 0]))
      return stack([self._empty if row < 0 else next(found) for row in wanted])
    except OSError as error:
      raise DataError(step, str(error)) from error

  def tally(self, step: int, *, hashes: bool) -> Tally:
    """The tally of the whole batch of `step`, which this call reads. Raises DataError as `batch` does."""
    total = Tally()
    for row in range(self._global_batch_size):  # one at a time, because a batch of many hosts is large
      total += tally.of_rows([row], self.batch(step, np.array([row])), hashes=hashes)
    return total

  def __iter__(self) -> Iterator[Batch]:
    """The global batches of all steps from 0 on. Endless, except for a mixture whose sources have limits."""
    last = self.last_step()
    return map(self.batch, itertools.count() if last is None else range(last))

  def dataset(self) -> grain.MapDataset[Batch]:
    """The batches by step as a grain.MapDataset, for its map, to_iter_dataset and mp_prefetch. Endless where the data
    are."""
    import grain  # takes a second

    last = self.last_step()
    return grain.MapDataset.range(sys.maxsize if last is None else last).map(self.batch)

  def cursor(self, step: int) -> dict[str, Any]:
    """The position before `step` as JSON for a checkpoint. The same on all hosts, for any number of hosts."""
    next_example = step * self._global_batch_size + self._offset
    epoch = next_example // self.num_examples if self.num_examples else 0
    mixture = self._mixture.cursor(next_example) if self._mixture else {}
    now = self._mixture.examples_read(next_example) if self._mixture else {self._id: next_example}
    return {
      "next_example": next_example,
      "seed": self._seed,
      "epoch": epoch,
      "mixture": mixture,
      "sources": self._read | now,
      "bad_records": self._source.bad_records,
    }

  def next_examples(self, step: int) -> str:
    """Hash of the first examples after `step` steps, for any batch size: 16 hex digits. "" if they cannot be read."""
    first = 0 if self._reuse_first else step * self._global_batch_size + self._offset
    content = hashlib.sha256()
    try:
      for index in range(first, first + _NEXT):
        for field in self._source.example(index):
          content.update(field.tobytes())
    except OSError:  # the end of the data, or a damaged record: the step that needs it will say so
      return ""
    return content.hexdigest()[:16]

  def fingerprint(self) -> str:
    """Identity of the examples and their order: 64 hex digits of data, tokenizer, packing and seed."""
    ordered = f"{self._source.fingerprint()} reuse={self._reuse_first}"
    return hashlib.sha256(ordered.encode()).hexdigest()

  def unigram_entropy(self) -> float | None:
    """Training loss of a unigram model (each token's frequency), nats per token; None for synthetic data."""
    return self._source.unigram_entropy()

  def unigram_eval_loss(self) -> float | None:
    """Evaluation loss of the unigram model of the training text (add-one smoothed); None without evaluation text."""
    return self._source.unigram_eval_loss()

  def describe(self, steps: int) -> dict[str, Any]:
    """What `steps` steps read, as JSON; fields that do not apply (random tokens, mixtures) are None.

    dataset, tokenizer (its name; None: the data are tokens), tokenizer_vocab_size, bos_token and eos_token (name and
    id), first_tokens (of the first batch, decoded), tokens and examples (of one epoch), density (share of the positions
    that count in the loss), run_tokens (of all steps, padding included), epochs (how often the run reads the data).
    """
    source, tokenizer = self._source, self._source.tokenizer
    examples = self._global_batch_size * (1 if self._reuse_first else steps)
    positions = source.num_examples * self._length if source.num_examples else 0
    return {
      "dataset": source.name,
      "tokenizer": tokenizer.name if tokenizer else None,
      "tokenizer_vocab_size": tokenizer.vocab_size if tokenizer else None,
      **ends(tokenizer),
      "first_tokens": self._first_tokens(),
      "tokens": source.num_targets,
      "examples": source.num_examples,
      "density": source.num_targets / positions if source.num_targets and positions else None,
      "run_tokens": steps * self._global_batch_size * self._length,
      "epochs": examples / source.num_examples if source.num_examples else None,
    }

  def _first_tokens(self) -> str | None:
    """The first tokens of the first batch, decoded; None if the data are not text, or cannot be read."""
    if (tokenizer := self._source.tokenizer) is None:
      return None
    try:
      first = self._source.example(0)
      return tokenizer.decode(first.tokens[first.segment_ids > 0][:_SHOWN], specials=True)
    except OSError:  # the step that needs it will say so
      return None

  def close(self) -> None:
    """Closes open files. Idempotent."""
    self._source.close()


def make_loader(
  cfg: DataOptions,
  *,
  vocab_size: int,
  global_batch_size: int,
  split: Split,
  mixture: Sequence[MixtureEntry] = (),
  dataset: Any = None,
  log: Callable[[str], None] = print,
) -> Loader:
  """The loader of a split. All tokens are below `vocab_size`, the model's V.

  mixture: sources to train on, in the place of the files that `cfg` names. dataset: a grain.MapDataset, or another
  object that is read by index, in the place of both. Prepares the data first if the cache does
  not have them; `log` gets a line about it. Raises ConfigError if the data cannot be read or are too little, the
  tokenizer has more than V ids, or there are no data for `split`.
  """
  assert global_batch_size >= 1, global_batch_size
  source: Source
  if dataset is not None:
    documents = elements.find("", dataset, cfg.train_data_columns)
    options = cfg.model_copy(update={"dataset_type": "grain"})
    (source,) = _open_all([_Found(options, {split: documents})], vocab_size, global_batch_size, split, log)
  elif cfg.dataset_type == "synthetic":
    stream = int(split == "eval")
    source = SyntheticSource(
      vocab_size=vocab_size, length=cfg.max_target_length, seed=cfg.data_shuffle_seed, stream=stream
    )
  elif mixture and split == "train":
    source = _open_mixture(mixture, vocab_size, global_batch_size, log)
  else:
    min_examples = global_batch_size if split == "train" else 0
    (source,) = _open_all([_Found(cfg, datasets.find(cfg))], vocab_size, min_examples, split, log)
  return Loader(source, cfg, global_batch_size, split)


def open_eval_sets(
  cfg: DataOptions,
  sets: Mapping[str, DataOptions],
  *,
  vocab_size: int,
  global_batch_size: int,
  tokenizer: Tokenizer | None,
  log: Callable[[str], None] = print,
) -> dict[str, Loader]:
  """{name: loader} of `sets`, {name: the options that name its documents as training data}.

  cfg: gives T and the seed. Texts are tokenised by `tokenizer`, or by the configured one if it is None. `log` gets a
  line about each set. Raises ConfigError like `make_loader`, naming the set.
  """
  found = []
  for name, options in sets.items():
    place = f"evaluation set {name}"
    with _naming(place):
      found.append(_Found(options, {"eval": datasets.find(options)["train"]}, place))
  sources = _open_all(found, vocab_size, 0, "eval", log, tokenizer)
  for name, source in zip(sets, sources, strict=True):
    tokens = f"{source.num_targets:,} tokens in " if source.num_targets else ""
    kind = f"{source.tokenizer.name} tokenizer" if source.tokenizer else "token ids"
    count = "endless" if source.num_examples is None else f"{source.num_examples:,}"
    log(f"Evaluation set {name}: {source.name}, {kind}, {tokens}{count} examples")
  return {name: Loader(source, cfg, global_batch_size, "eval") for name, source in zip(sets, sources)}


def check(data: Iterable[DataOptions], vocab_size: int) -> None:
  """Raises ConfigError for data of a wrong kind, as far as their first documents show it; see `prepared.check`."""
  data = [options for options in data if options.dataset_type != "synthetic"]
  found = [_Found(options, {} if options.dataset_type == "text" else datasets.find(options)) for options in data]

  def check_one(one: _Found, call: workers.Call) -> None:
    if (theirs := _examples(one.splits.get("train"))) is not None:
      elements.ElementsSource(theirs, one.options.max_target_length, vocab_size, "train")
    else:
      prepared.check(one.options, one.splits, vocab_size, call)

  workers.prepare_each(check_one, found, [one.size for one in found])


def _examples(documents: Documents | None) -> elements.Elements | None:
  """The dataset in Python if its elements are examples."""
  return documents.elements if documents and documents.elements and documents.elements.has_examples else None


class _Found(NamedTuple):
  """A dataset whose files have been found."""

  options: DataOptions
  splits: Mapping[str, Documents]
  place: str = ""  # in the configuration, for error messages

  @property
  def size(self) -> int:
    """Bytes of all files, and of datasets that other processes can read."""
    kept = [one for one in self.splits.values() if not one.elements or one.elements.reference]
    return sum(documents.size for documents in kept)


@contextlib.contextmanager
def _naming(place: str) -> Iterator[None]:
  """Puts `place`, if there is one, before the message of a ConfigError."""
  try:
    yield
  except ConfigError as error:
    if not place:
      raise
    raise ConfigError(f"{place}: {error}") from error


def _open_all(
  found: Sequence[_Found],
  vocab_size: int,
  min_examples: int,
  split: str,
  log: Callable[[str], None],
  tokenizer: Tokenizer | None = None,
) -> list[_Opened]:
  """The source of a split of each dataset, read in place if that is possible."""
  keys: dict[str, Any] = {"vocab_size": vocab_size, "min_examples": min_examples, "split": split, "log": log}

  def open_one(one: _Found, call: workers.Call) -> _Opened:
    with _naming(one.place):
      documents = one.splits.get(split)
      if documents and documents.left_out:
        log(f"Not read in {documents.name}: {documents.left_out}")
      if (theirs := _examples(documents)) is not None:
        return elements.ElementsSource(theirs, one.options.max_target_length, vocab_size, split)
      if in_place.applies(one.options):
        return in_place.open_source(one.options, documents, call=call, **keys)
      return prepared.open_source(one.options, one.splits, call=call, tokenizer=tokenizer, **keys)

  return workers.prepare_each(open_one, found, [one.size for one in found])


def _open_mixture(
  entries: Sequence[MixtureEntry], vocab_size: int, batch: int, log: Callable[[str], None]
) -> MixtureSource:
  """The training source of a mixture. Raises ConfigError if a source has no example, or two have the same examples."""
  members: list[Member] = []
  names: dict[str, str] = {}
  orders: set[str] = set()
  found = [_Found(entry.options, datasets.find(entry.options)) for entry in entries]
  for entry, source in zip(entries, _open_all(found, vocab_size, 1, "train", log), strict=True):
    if source.num_examples is None and math.isfinite(entry.epochs):
      raise ConfigError(f"{entry.name}: epochs={entry.epochs:g} of data without an end. Remove epochs, or .repeat().")
    limit = entry.epochs if math.isinf(entry.epochs) else int(entry.epochs * (source.num_examples or 0))
    if limit == 0:
      raise ConfigError(
        f"{entry.name}: epochs={entry.epochs:g} of its {source.num_examples} examples is not one example. Raise epochs."
      )
    if other := names.get(source.fingerprint()):
      raise ConfigError(f"{other} and {entry.name} have the same data. Keep one of them, with the sum of the weights.")
    names[source.fingerprint()] = entry.name
    if isinstance(source, elements.ElementsSource):
      members.append(Member(entry.name, source, entry.weights, limit))
      continue
    if source.order.source in orders:  # two views of the same documents, of which the first ones are equal
      source.order.set_source(source.fingerprint())
    orders.add(source.order.source)
    members.append(Member(entry.name, source, entry.weights, limit))
  return MixtureSource(members, batch)
