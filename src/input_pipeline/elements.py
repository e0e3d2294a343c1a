"""Somebody's own dataset: a grain.MapDataset, or any object that has a length and is read by index.

Its elements are documents, which are packed like the documents of files, or examples, which are read in place in the
order of the dataset.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np

from input_pipeline import contents, record
from input_pipeline.batch import Example, empty_example
from input_pipeline.documents import BadRecord, Document, Documents, Piece, uncut
from input_pipeline.input_errors import ConfigError, shorten
from input_pipeline.source import Source

_PLACES = 16  # of elements that the fingerprint is computed from, with the last one
_ENDLESS = 2**62  # grain's repeat() has the length sys.maxsize
_LOOKED_AT = 10_000  # elements, for one that is not None
_AT_ONCE = 256  # elements
_THREADS = 16  # as grain's ReadOptions
_MAXTEXT = {"inputs": "tokens", "inputs_position": "positions"}
_MAXTEXT |= {"inputs_segmentation": "segment_ids", "targets_segmentation": "weights"}


@dataclass(frozen=True)
class Elements:
  """A dataset, in the place of the file of a Piece. It can be sent to another process if it has a reference."""

  name: str
  version: str
  """64 hex digits: of the length, and the stated fingerprint or elements at fixed places."""
  length: int
  has_examples: bool
  reference: str
  given: Any = field(default=None, compare=False)

  def __reduce__(self) -> tuple[Any, ...]:
    assert self.reference, "a dataset without a reference stays in its process"
    return Elements, (self.name, self.version, self.length, self.has_examples, self.reference)

  def __str__(self) -> str:
    return self.name

  @cached_property
  def dataset(self) -> Any:
    return self.given if self.given is not None else _load(self.reference)[0]

  @cached_property
  def _begins_anew(self) -> bool:
    """Whether elements after the last one are the next epoch, which a MapDataset may shuffle anew."""
    is_map = next(_nodes(self.dataset), None) is not None
    return is_map and not any(map(_is_slice_of_shuffled, _nodes(self.dataset)))

  def read(self, number: int) -> Any:
    """The element with this number; after the last one the next epoch begins.

    Raises OSError, naming the element, whatever the dataset raises.
    """
    try:
      return self.dataset[number if self._begins_anew else number % self.length]
    except Exception as error:
      raise OSError(f"element {number} of {self.name} cannot be read ({type(error).__name__}: {error})") from error


def _nodes(dataset: Any) -> Iterator[Any]:
  """Yields a MapDataset and all datasets that it is made of; nothing for another object."""
  grain = sys.modules.get("grain")  # who made a MapDataset has imported it
  if grain is not None and isinstance(dataset, grain.MapDataset):
    yield dataset
    for parent in dataset.parents:
      yield from _nodes(parent)


def _is_slice_of_shuffled(node: Any) -> bool:
  """Whether elements after the last one of a MapDataset are outside its slice (google/grain issue 1200)."""
  return "Slice" in type(node).__name__ and any("Shuffle" in type(one).__name__ for one in _nodes(node))


def require_random_access(what: str, dataset: object) -> None:
  """Raises ConfigError, which begins with `what`, if the object is not read by index."""
  grain = sys.modules.get("grain")
  if isinstance(dataset, Iterator) or (grain is not None and isinstance(dataset, grain.IterDataset)):
    raise ConfigError(
      f"{what}: {type(dataset).__name__} is an iterator: it has a state, so an example is not a function of its index, "
      "and a resume or another number of slices would repeat or lose examples.\nGive the grain.MapDataset before "
      ".to_iter_dataset(); packing, batches and prefetching are the trainer's."
    )
  is_indexed = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
  if not is_indexed or isinstance(dataset, type | str | bytes | Mapping):
    raise ConfigError(
      f"{what}: {shorten(' '.join(repr(dataset).split()))} is not read by index.\nGive a grain.MapDataset, a list, or "
      "an object with __len__ and __getitem__."
    )


def _load(reference: str) -> tuple[Any, Any]:
  """(dataset, function) of package.module:function. Raises ConfigError if there is none in this process."""
  module, _, name = reference.partition(":")
  try:
    function = getattr(importlib.import_module(module), name)
    return function(), function
  except Exception as error:
    raise ConfigError(
      f"grain_dataset={reference}: this process cannot call it ({type(error).__name__}: {error}).\nFix the function. "
      "Every process imports it: install its package, and what it needs, on every host, or set PYTHONPATH."
    ) from error


def find(reference: str, given: Any, column: str) -> Documents:
  """The elements of a dataset: of the function that `reference` names, or `given`. column: train_data_columns.

  Raises ConfigError if the first element cannot be trained on, or is another one when it is read again.
  """
  dataset, function = (given, None) if given is not None else _load(reference)
  name = f"grain_dataset={reference}" if reference else type(dataset).__name__
  require_random_access(name, dataset)
  if not (length := len(dataset)):
    raise ConfigError(f"{name} has no elements.\nGive a dataset with at least one.")
  for node in _nodes(dataset):
    if "Repeat" in type(node).__name__ and any(map(_is_slice_of_shuffled, _nodes(node))):
      raise ConfigError(
        f"{name}: .repeat() after a slice of shuffled elements gives elements outside the slice from its second epoch "
        "on.\nRemove .repeat(): the trainer begins the slice again, in the same order. Or slice before .shuffle()."
      )
  elements = Elements(name, "", length, False, reference, dataset)
  end = min(length, 2**20) if length >= _ENDLESS else length
  places = sorted({end * place // _PLACES for place in range(_PLACES)} | {end - 1})
  number, first = _first(elements, places)
  if _plain(first) != _plain(elements.read(number)):
    raise ConfigError(
      f"{name}: element {number} is another one when it is read again, so a resume or another process would train on "
      "other data.\nMake it depend on the index alone, for example with MapDataset.seed and random_map."
    )
  stated = getattr(function, "fingerprint", None) or getattr(dataset, "fingerprint", None)
  stated = stated() if callable(stated) else stated
  if not isinstance(stated, str | None):
    raise ConfigError(f"{name}: its fingerprint is {shorten(repr(stated))}.\nGive a string that changes with the data.")
  samples = [first] if stated else [_or_none(elements, place) for place in places]
  version = contents.hash_of(length, stated or [_plain(sample) for sample in samples])
  size, has_examples = 0, _is_example(first)
  if not has_examples:
    try:
      document(first, column)
    except ValueError as error:
      raise ConfigError(f"{name}: element {number}: {error}.") from error
    if length >= _ENDLESS:
      raise ConfigError(f"{name}: is endless.\nGive documents before .repeat(): the trainer begins them again.")
    size = length * sum(_bytes(sample, column) for sample in samples) // len(samples)
  found = Elements(name, version, length, has_examples, reference, dataset)
  piece = Piece("elements", found, 0, length)  # type: ignore[arg-type]
  reader = partial(read, column=column)
  return Documents(name, [piece], reader, f"elements {column}", uncut, elements=found, bytes=size)


def _first(elements: Elements, places: Sequence[int]) -> tuple[int, Any]:
  """(number, element) of the first element found that can be read and is not None, which filters leave."""
  problem = "all elements that were looked at are None"
  for number in itertools.chain(places, range(min(elements.length, _LOOKED_AT))):
    try:
      if (element := elements.read(number)) is not None:
        return number, element
    except OSError as error:
      problem = str(error)
  raise ConfigError(f"{elements.name}: {problem}.\nGive other elements.")


def _or_none(elements: Elements, number: int) -> Any:
  try:
    return elements.read(number)
  except OSError:
    return None


def _plain(element: Any) -> Any:
  """The content of an element as JSON: of mappings, sequences, arrays, strings and numbers."""
  if isinstance(element, Mapping):
    return {str(key): _plain(element[key]) for key in sorted(element, key=str)}
  if isinstance(element, list | tuple):
    return [_plain(part) for part in element]
  if element is None or isinstance(element, bool | int | float | str):
    return element
  array = np.asarray(element)
  return [array.dtype.str, array.shape, array.tobytes().hex()] if array.dtype != object else type(element).__name__


# ---- documents


def read(piece: Piece, column: str) -> Iterator[Document | BadRecord]:
  """Yields the documents of a dataset in order, read by several threads. None is an empty document."""
  elements: Any = piece.path

  def one(number: int) -> Document | BadRecord:
    try:
      return document(elements.read(number), column)
    except OSError as error:
      return BadRecord(f"{error}.")
    except ValueError as error:
      return BadRecord(f"element {number} of {elements.name}: {error}.")

  with ThreadPoolExecutor(_THREADS) as threads:
    for start in range(0, elements.length, _AT_ONCE):
      yield from threads.map(one, range(start, min(start + _AT_ONCE, elements.length)))


def document(element: Any, column: str) -> Document:
  """The text, token ids, or conversation of an element. Raises ValueError for another element.

  An element is a document, a pair of ids and mask, or a mapping with a document in `column` and perhaps a `mask`.
  """
  if isinstance(element, Mapping):
    return record.of_fields(element, column)
  found, mask = element if isinstance(element, tuple) and len(element) == 2 else (element, None)
  return record.of_value(found, {"mask": mask})


def _bytes(element: Any, column: str) -> int:
  try:
    found = document(element, column)
  except ValueError:
    return 0
  return len(found) if isinstance(found, str) else 4 * len(found)


# ---- examples


class ElementsSource(Source):
  """An example is an element; None is a row of padding. After the last element the next epoch begins."""

  def __init__(self, elements: Elements, length: int, vocab_size: int, split: str) -> None:
    """Raises ConfigError if the first element is not an example of at most `length` tokens below `vocab_size`."""
    self.name = elements.name
    self.num_examples = elements.length if elements.length < _ENDLESS else None
    self._elements, self._length, self._vocab_size, self._split = elements, length, vocab_size, split
    self._threads = ThreadPoolExecutor(_THREADS)  # starts them when they are needed
    try:
      self.example(0)
    except OSError as error:
      raise ConfigError(f"{error}.") from error

  def __reduce__(self) -> tuple[Any, ...]:
    return ElementsSource, (self._elements, self._length, self._vocab_size, self._split)

  def example(self, index: int) -> Example:
    if self._split == "eval" and index >= self._elements.length:
      return empty_example(self._length)
    element = self._elements.read(index)
    try:
      return empty_example(self._length) if element is None else self._example(element)
    except (ValueError, TypeError) as error:
      raise OSError(f"element {index} of {self.name}: {error}") from error

  def examples(self, indices: Sequence[int]) -> list[Example]:
    return list(self._threads.map(self.example, indices))

  def fingerprint(self) -> str:
    return f"elements-1 {self._elements.version} length={self._length} vocab={self._vocab_size} split={self._split}"

  def close(self) -> None:
    self._threads.shutdown(wait=False, cancel_futures=True)

  def _example(self, element: Any) -> Example:
    """The example of an element, padded to T. Raises ValueError if it is none."""
    if not _is_example(element):
      raise ValueError(f"it is a {type(element).__name__} without inputs and targets, and elements before it had them")
    given = element._asdict() if hasattr(element, "_asdict") else element
    fields = {_MAXTEXT.get(name, name): np.asarray(value) for name, value in given.items()}
    shape = fields["tokens"].shape
    if len(shape) != 1 or not 1 <= shape[0] <= self._length:
      raise ValueError(
        f"its tokens have shape {shape}, and an example has at most max_target_length={self._length} tokens. Give the "
        "dataset before .batch, with examples of this length"
      )
    segment_ids = fields.get("segment_ids")
    if segment_ids is None:
      fields["segment_ids"], begins = np.ones(shape, np.int32), np.zeros(1, np.int64)
    else:
      begins = np.flatnonzero(np.diff(segment_ids, prepend=-1))
    fields.setdefault("positions", np.arange(shape[0]) - np.repeat(begins, np.diff(begins, append=shape[0])))
    weights = fields.setdefault("weights", fields["segment_ids"])
    if weights.dtype.kind in "iub":  # MaxText has numbers of segments here
      fields["weights"] = weights != 0
    padding = None if segment_ids is None or segment_ids.all() else segment_ids == 0
    bounds = {"tokens": self._vocab_size, "targets": self._vocab_size, "positions": self._length}
    rows = {}
    for name in Example._fields:
      array, most = fields[name], bounds.get(name, 2**24)
      if array.shape != shape or (array.dtype.kind not in "iu" and name != "weights"):
        raise ValueError(f"its {name} are {array.dtype} with shape {array.shape}. Give {shape[0]} integers")
      array = array if padding is None else np.where(padding, 0, array)
      least, largest = array.min(), array.max()
      if not (least >= 0 and largest < most):
        raise ValueError(f"its {name} are from {least} to {largest}. Give numbers from 0 to {most} - 1")
      rows[name] = np.zeros(self._length, np.float32 if name == "weights" else np.int32)
      rows[name][: shape[0]] = array
    return Example(**rows)


def _is_example(element: Any) -> bool:
  """Whether an element has the fields of an example: MaxText's or ours."""
  names = element if isinstance(element, Mapping) else getattr(element, "_fields", ())
  return "targets" in names and ("inputs" in names or "tokens" in names)
