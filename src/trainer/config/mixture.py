"""The file of a mixture: for each source its weight, its limit of epochs, and where its documents are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from trainer.config import files
from trainer.config.errors import ConfigError, Problems, did_you_mean, shorten
from trainer.config.keys import all_keys, convert
from trainer.config.schema import DataSection

# The keys of a source by its dataset_type. All other data keys hold for the whole mixture.
_SOURCE_KEYS = {
  "grain": ("grain_train_files", "grain_file_type", "train_data_columns"),
  "text": ("dataset_path",),
  "tfds": ("dataset_path", "train_split", "train_data_columns"),
}
_MOST_SOURCES = 1000


@dataclass(frozen=True)
class MixtureEntry:
  """One source of a mixture."""

  name: str
  weight: Fraction
  """Share of the examples, relative to the other weights; above 0."""
  epochs: float
  """How often the source may be read; infinity: without a limit."""
  section: DataSection
  """The data keys of this source alone."""


def read(data: DataSection) -> list[MixtureEntry]:
  """The sources of data.grain_train_mixture_config_path, in the order of the file.

  The file is YAML or JSON: a mapping from names to mappings with `weight`, optionally `epochs` and dataset_type, and
  the keys of the source. `path` is MaxText's name for grain_train_files. Raises ConfigError for every mistake.
  """
  path = files.find(data.grain_train_mixture_config_path, files.search_folders(), "mixture")
  groups = files.read_groups(path)
  problems = Problems()
  entries = []
  for name, (given, origin) in groups.items():
    with problems.collect():
      entries.append(_entry(name, given, origin, data))
  if not 1 <= len(groups) <= _MOST_SOURCES:
    problems.add([f"{files.shown(path)}: has {len(groups)} sources.\nGive 1 to {_MOST_SOURCES} sources."])
  problems.raise_any()
  return entries


def _entry(name: str, written: dict[str, tuple[str | None, str]], origin: str, data: DataSection) -> MixtureEntry:
  """The source `name` from its part of the file."""
  given: dict[str, tuple[str, str]] = {}
  for key, (text, place) in written.items():
    if text is None:
      raise ConfigError(f"{place}: {key} holds a list or a mapping.\nWrite `{key}: value`.")
    given["grain_train_files" if key == "path" else key] = text, place
  if "weight" not in given:
    raise ConfigError(f"{origin}: {name} has no weight.\nAdd `weight: NUMBER`, its share relative to the others.")
  weight = _number("weight", *given.pop("weight"))
  if math.isinf(weight):
    raise ConfigError(f"{origin}: the weight of {name} is infinite.\nGive a number above 0.")
  epochs = _number("epochs", *given.pop("epochs")) if "epochs" in given else math.inf
  kind = "grain"
  if "dataset_type" in given:
    kind = str(convert(all_keys()["dataset_type"], *given.pop("dataset_type")).value)
  if kind not in _SOURCE_KEYS:
    raise ConfigError(f"{origin}: {name} has dataset_type={kind}.\nChoices in a mixture: {', '.join(_SOURCE_KEYS)}.")
  # Only the keys of this source; a mixture trains on all of a text, and its evaluation data have a key of their own.
  values: dict[str, object] = dict.fromkeys(
    ("grain_train_mixture_config_path", "grain_eval_files", "grain_train_files"), ""
  )
  values |= {"dataset_type": kind, "eval_fraction": 0.0}
  for key, (text, place) in given.items():
    if key not in _SOURCE_KEYS[kind]:
      raise ConfigError(
        f"{place}: {key} is not a key of a source with dataset_type={kind}.\n{did_you_mean(key, _SOURCE_KEYS[kind])}"
        f"Give weight, epochs, dataset_type, {', '.join(_SOURCE_KEYS[kind])}. Set other keys for the whole mixture."
      )
    values[key] = convert(all_keys()[key], text, place).value
  if kind == "grain" and not values["grain_train_files"]:
    raise ConfigError(f"{origin}: {name} has no files.\nAdd `grain_train_files: FILES`, or another dataset_type.")
  return MixtureEntry(name, Fraction(str(weight)), epochs, data.model_copy(update=values))


def _number(key: str, text: str, origin: str) -> float:
  """`text` as a number above 0."""
  try:
    number = float(text)
  except ValueError:
    number = math.nan
  if not number > 0:
    raise ConfigError(f"{origin}: {key} is {shorten(text)}.\nGive a number above 0.")
  return number
