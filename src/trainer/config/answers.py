"""Names and values of other programs that this program lacks: the answer to a user who gives one of them.

answers.yml has them: the keys of MaxText, options of launchers, and settings of other trainers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

# What an unknown value of a key may have been meant for.
HINTS = {"cluster": "If this is the name of a GKE cluster, give it to xpk or gcluster, outside the command.\n"}

# Values of MaxText that mean "not set", and what they are here.
_UNSET = {"compile_topology_num_slices": {"-1": "1"}}

_OLDER = "a key of older versions"
# Values of MaxText that turn off what a key is about.
_OFF = ("", "0", "0.", "0.0", "-1", "-1.0", "false", "none", "[[]]")


@dataclass(frozen=True)
class Answer:
  """What a name is, and what to do instead.

  safe: values with which a run has the same numbers without the name. default: another one, which a removed key had.
  renamed: the key that has its value here, or "".
  """

  what: str
  remedy: str
  safe: tuple[str, ...] = _OFF
  default: str | None = None
  renamed: str = ""

  @property
  def is_older(self) -> bool:
    """Whether this program had a key of this name."""
    return self.what.endswith("of older versions")

  def changes_numbers(self, value: str) -> bool:
    """Whether a run with this value of the key computes something that this program does not."""
    return value.lower() != self.default and not any(fnmatchcase(value.lower(), pattern) for pattern in self.safe)


def answer_for(name: str) -> Answer | None:
  """Returns the answer to a name of another program that this program lacks; None for other names.

  name: with _ for -, and perhaps with a section: a section that the answers do not name makes no difference.
  """
  for spelled in (name, name.rpartition(".")[2]):
    if spelled in all_answers():
      return all_answers()[spelled]
    for pattern, answer in all_answers().items():
      if "*" in pattern and fnmatchcase(spelled, pattern):
        return answer
  return None


def answer_for_value(name: str, value: str) -> str | None:
  """Returns what to do instead of giving another program's `value` of the key `name`; None for other values."""
  for row, remedy in tables()["values"].items():
    key, _, patterns = row.partition("=")
    if key == name and any(fnmatchcase(value, pattern) for pattern in patterns.split()):
      return remedy
  return None


def says_nothing(name: str, value: str | None, *, recorded: bool) -> bool:
  """Whether a run is the same without a name that is no key: a removed key with its default, if others have the key.

  recorded: in a file with every key of an older version, also a key of it that does not change the numbers of the run.
  """
  answer = answer_for(name.replace("-", "_"))
  if answer is None or value is None:
    return False
  if recorded and answer.is_older:
    return not answer.changes_numbers(value)
  return value.lower() == answer.default and answer.what != _OLDER


def lost(name: str, value: str) -> str:
  """What to do about a key of older versions with a value that changed the numbers of the run; "" for others."""
  answer = answer_for(name)
  return answer.remedy if answer and answer.is_older and answer.changes_numbers(value) else ""


def translated(name: str, value: str) -> str:
  """Returns `value` of the key `name`, with MaxText's value for "not set" replaced by the one of this program."""
  return _UNSET.get(name, {}).get(value, value)


@functools.cache
def all_answers() -> dict[str, Answer]:
  """Returns {name or pattern: its answer}."""
  found: dict[str, Answer] = {}
  for group in tables()["names"]:
    safe = tuple(group["safe"].split()) if "safe" in group else _OFF
    for names, remedy in group["remedies"].items():
      for entry in names.split():
        name, has_default, default = entry.partition("=")
        found[name] = Answer(group["what"], remedy, safe, default if has_default else None)
  renamed = tables()["renamed"].items()
  return found | {name: Answer("a key of MaxText", f"Set {ours}.", renamed=ours) for name, ours in renamed}


@functools.cache
def tables() -> dict[str, Any]:
  """Returns answers.yml."""
  loader: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)  # texts only: true stays "true"
  return yaml.load(Path(__file__).with_name("answers.yml").read_text(), loader)
