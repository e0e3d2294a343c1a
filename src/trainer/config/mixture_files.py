"""The files of a mixture and of evaluation sets: for each source where its documents are, and its share."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import TypeVar

from input_pipeline.options import DataOptions, MixtureEntry
from trainer.config import config_files
from trainer.config.errors import ConfigError, Problems, did_you_mean, shorten
from trainer.config.keys import all_keys, convert
from trainer.config.schema import DataSection

T = TypeVar("T")
Written = dict[str, tuple[str | None, str]]  # {key: (value, place)} of a source; None: a list or a mapping

# The keys of a source by its dataset_type. All other data keys hold for the whole mixture.
_SOURCE_KEYS = {
  "grain": ("grain_train_files", "grain_dataset", "grain_file_type", "train_data_columns"),
  "text": ("dataset_path",),
  "tfds": ("dataset_path", "train_split", "train_data_columns"),
  "hf": ("dataset_path", "train_split", "train_data_columns"),
}
_MOST_SOURCES = 1000
_MOST_WEIGHTS = 100  # of a source
EVAL_DATA = "eval"
"""Name of the evaluation data that other keys than eval_sets give."""


def read(data: DataSection) -> list[MixtureEntry]:
  """The sources of data.grain_train_mixture_config_path, in the order of the file; [] if the run has no mixture.

  The file is YAML or JSON: a mapping from names to mappings with `weight`, optionally `epochs` and dataset_type, and
  the keys of the source. `path` is MaxText's name for grain_train_files. Raises ConfigError for every mistake.
  """
  if data.dataset_type != "grain" or not data.grain_train_mixture_config_path:
    return []
  make = lambda name, written, origin: _entry(name, written, origin, data)
  place, found = _read(data.grain_train_mixture_config_path, "mixture", "sources", make)
  entries = list(found.values())
  for step in sorted({step for entry in entries for step, _ in entry.weights}):
    if not any(max(pair for pair in entry.weights if pair[0] <= step)[1] for entry in entries):
      raise ConfigError(f"{place}: all weights are 0 from step {step} on.\nGive one source a weight there.")
  return entries


def read_eval_sets(data: DataSection) -> dict[str, DataOptions]:
  """{name: the data keys of the set} of data.eval_sets, in the order of the file; {} if it is empty.

  The file is like the file of a mixture, without weights and epochs: the key that names training data names the
  documents of the set. Raises ConfigError for every mistake.
  """
  if not data.eval_sets:
    return {}

  def make(name: str, written: Written, origin: str) -> DataOptions:
    if name == EVAL_DATA:
      raise ConfigError(f"{origin}: {name} is the name of the evaluation data of other keys.\nChoose another name.")
    return _section(name, _scalars(written), origin, data, ())

  return _read(data.eval_sets, "file of eval_sets", "sets", make)[1]


def _read(given: str, what: str, parts: str, make: Callable[[str, Written, str], T]) -> tuple[str, dict[str, T]]:
  """(the file in words, {name: make(name, its part of the file, the place of the part)}) of a file of sources. what,
  parts: the file and its parts in messages. Raises ConfigError for every mistake."""
  path = config_files.find(given, config_files.search_folders(), what)
  groups = config_files.read_groups(path)
  problems = Problems()
  made: dict[str, T] = {}
  for name, (written, origin) in groups.items():
    with problems.collect():
      made[name] = make(name, written, origin)
  if not 1 <= len(groups) <= _MOST_SOURCES:
    problems.add([f"{config_files.shown(path)}: has {len(groups)} {parts}.\nGive 1 to {_MOST_SOURCES} {parts}."])
  problems.raise_any()
  return config_files.shown(path), made


def _scalars(written: Written) -> dict[str, tuple[str, str]]:
  """The keys of a source with their values and places."""
  given: dict[str, tuple[str, str]] = {}
  for key, (text, place) in written.items():
    if text is None:
      raise ConfigError(f"{place}: {key} holds a list or a mapping.\nWrite `{key}: value`.")
    given["grain_train_files" if key == "path" else key] = text, place
  return given


def _entry(name: str, written: Written, origin: str, data: DataSection) -> MixtureEntry:
  """The source `name` from its part of the file."""
  given = _scalars(written)
  if "weight" not in given:
    raise ConfigError(f"{origin}: {name} has no weight.\nAdd `weight: NUMBER`, its share relative to the others.")
  weights = _weights(*given.pop("weight"))
  epochs = _number("epochs", *given.pop("epochs")) if "epochs" in given else math.inf
  return MixtureEntry(name, weights, epochs, _section(name, given, origin, data, ("weight", "epochs")))


def _section(
  name: str, given: dict[str, tuple[str, str]], origin: str, data: DataSection, others: tuple[str, ...]
) -> DataSection:
  """The data keys of the source `name`. others: keys that it may have besides these, for the message."""
  kind = "grain"
  if "dataset_type" in given:
    kind = str(convert(all_keys()["dataset_type"], *given.pop("dataset_type")).value)
  if kind not in _SOURCE_KEYS:
    raise ConfigError(f"{origin}: {name} has dataset_type={kind}.\nChoices in this file: {', '.join(_SOURCE_KEYS)}.")
  # Only the keys of this source; a mixture trains on all of a text, and its evaluation data have a key of their own.
  of_others = "grain_train_mixture_config_path grain_eval_files grain_train_files grain_dataset eval_split"
  values: dict[str, object] = dict.fromkeys([*of_others.split(), "eval_dataset_path"], "")
  values |= {"dataset_type": kind, "eval_fraction": 0.0}
  for key, (text, place) in given.items():
    if key not in _SOURCE_KEYS[kind]:
      raise ConfigError(
        f"{place}: {key} is not a key of a source with dataset_type={kind}.\n{did_you_mean(key, _SOURCE_KEYS[kind])}"
        f"Give {', '.join([*others, 'dataset_type', *_SOURCE_KEYS[kind]])}. Set other keys for the whole run."
      )
    values[key] = convert(all_keys()[key], text, place).value
  if kind == "grain" and not (values["grain_train_files"] or values["grain_dataset"]):
    raise ConfigError(f"{origin}: {name} has no files.\nAdd `grain_train_files: FILES`, or another dataset_type.")
  return data.model_copy(update=values)


def _weights(text: str, origin: str) -> tuple[tuple[int, Fraction], ...]:
  """The weights in `text`: a number above 0, or several, each from a step on: "0.7, 0.3 @ 1000, 0 @ 5000"."""
  found: list[tuple[int, Fraction]] = []
  for number, part in enumerate(text.split(",")):
    weight, at, step = part.partition("@")
    try:
      found.append((int(step) if at else 0, Fraction(str(float(weight)))))
    except ValueError:  # no number, or not finite
      break
    if bool(at) != bool(number) or found[-1][1] < 0 or (number and found[-1][0] <= found[-2][0]):
      break
  else:
    if len(found) <= _MOST_WEIGHTS and any(weight for _, weight in found):
      return tuple(found)
  raise ConfigError(
    f"{origin}: weight is {shorten(text)}.\nGive a number above 0, or at most {_MOST_WEIGHTS} weights from 0 on that "
    "change at ascending steps, such as `weight: '0.7, 0.3 @ 1000'`."
  )


def _number(key: str, text: str, origin: str) -> float:
  try:
    number = float(text)
  except ValueError:
    number = math.nan
  if not number > 0:
    raise ConfigError(f"{origin}: {key} is {shorten(text)}.\nGive a number above 0.")
  return number
