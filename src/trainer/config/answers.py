"""Names and values of other programs that this program lacks: the answer to a user who gives one of them.

answers.yml has them: the keys of MaxText, options of launchers, and settings of other trainers.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from fnmatch import translate
from pathlib import Path
from typing import Any

import yaml

# What an unknown value of a key may have been meant for.
HINTS = {"cluster": "If this is the name of a GKE cluster, give it to xpk or gcluster, outside the command.\n"}

# Values of MaxText that turn off what a key is about.
_OFF = ("", "0", "0.", "0.0", "-1", "-1.0", "false", "none", "[[]]")

# Values of MaxText that mean "not set", and what they are here.
_UNSET = {"num_slices": {"-1": "0"}, "compile_topology_num_slices": {"-1": "1"}}


def answer(name: str) -> tuple[str, str] | None:
  """Returns (what `name` is, what to do), or None if it is no name of another program that this program lacks.

  name: with _ for -, and perhaps with a section: a section that the answers do not name makes no difference.
  """
  found = entry_of(name)
  return (found["what"], found["remedy"]) if found else None


def entry_of(name: str) -> dict[str, str] | None:
  """Returns the entry of answers.yml for a name, as `answer` finds it."""
  for spelled in dict.fromkeys([name, name.rpartition(".")[2]]):
    for pattern, entry in _patterns("keys", "names"):
      if pattern.fullmatch(spelled):
        return entry
  return None


def changes_numbers(entry: Mapping[str, str], value: str) -> bool:
  """Whether a run of MaxText with this value of a key computes something that this program does not."""
  safe = entry["safe"].split() if "safe" in entry else _OFF
  return not any(re.fullmatch(translate(pattern), value, re.IGNORECASE) for pattern in safe)


def answer_for_value(name: str, value: str) -> str | None:
  """Returns what to do instead of giving another program's `value` of the key `name`; None for other values."""
  for pattern, entry in _patterns("values", "values"):
    if entry["key"] == name and pattern.fullmatch(value):
      return entry["remedy"]
  return None


def is_removed(name: str, value: str | None) -> bool:
  """Whether `name` was a key and `value` its default, as config.yml of an older run has it: nothing is lost then."""
  removed = next((entry for entry in tables()["keys"] if name.replace("-", "_") in entry["names"].split()), {})
  return value is not None and value.lower() == removed.get("default")


def translated(name: str, value: str) -> str:
  """Returns `value` of the key `name`, with MaxText's value for "not set" replaced by the one of this program."""
  return _UNSET.get(name, {}).get(value, value)


@functools.cache
def tables() -> dict[str, list[dict[str, str]]]:
  """Returns answers.yml: the first entry that matches counts, and * in a name is any text."""
  loader: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)  # texts only: true stays "true"
  tables: dict[str, list[dict[str, str]]] = yaml.load((Path(__file__).with_name("answers.yml")).read_text(), loader)
  return tables


@functools.cache
def _patterns(table: str, field: str) -> list[tuple[re.Pattern[str], dict[str, str]]]:
  return [(re.compile("|".join(map(translate, entry[field].split()))), entry) for entry in tables()[table]]
