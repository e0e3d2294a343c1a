"""Names and values of other programs that this program lacks: the answer to a user who gives one of them.

answers.yml has them: the keys of MaxText, options of launchers, and settings of other trainers.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

# What an unknown value of a key may have been meant for.
HINTS = {"cluster": "If this is the name of a GKE cluster, give it to xpk or gcluster, outside the command.\n"}

_OLDER = "of older versions"  # how `what` of a key ends that this program had
# Values of MaxText that turn off what a key is about.
_OFF = ("", "0", "0.", "0.0", "-1", "-1.0", "false", "none", "[[]]")

# Values of MaxText that mean "not set", and what they are here.
_UNSET = {"compile_topology_num_slices": {"-1": "1"}}


def entry_of(name: str) -> dict[str, str] | None:
  """Returns the entry of answers.yml for a name of another program that this program lacks; None for other names.

  The entry has `what` (what the name is) and `remedy`. name: with _ for -, and perhaps with a section: a section that
  the answers do not name makes no difference.
  """
  for spelled in (name, name.rpartition(".")[2]):
    if spelled in _entries():
      return _entries()[spelled]
    for pattern, entry in _entries().items():
      if "*" in pattern and fnmatchcase(spelled, pattern):
        return entry
  return None


def changes_numbers(entry: Mapping[str, str], value: str) -> bool:
  """Whether a run of MaxText with this value of a key computes something that this program does not."""
  safe = entry["safe"].split() if "safe" in entry else _OFF
  return not any(fnmatchcase(value.lower(), pattern) for pattern in safe)


def answer_for_value(name: str, value: str) -> str | None:
  """Returns what to do instead of giving another program's `value` of the key `name`; None for other values."""
  for patterns, remedy in tables()["values"].get(name, {}).items():
    if any(fnmatchcase(value, pattern) for pattern in patterns.split()):
      return remedy
  return None


def says_nothing(name: str, value: str | None, *, recorded: bool) -> bool:
  """Whether a run is the same without a name that is no key: a key of MaxText with the value of what is done anyway.

  recorded: in a file with every key of an older version, also a key of it that does not change the numbers of the run.
  """
  entry = entry_of(name.replace("-", "_"))
  if entry is None or value is None:
    return False
  dropped = recorded and entry["what"].endswith(_OLDER) and not changes_numbers(entry, value)
  return dropped or value.lower() == entry.get("accepted")


def lost(name: str, value: str) -> str:
  """What to do about a key of older versions with a value that changed the numbers of the run; "" for others."""
  entry = entry_of(name)
  return entry["remedy"] if entry and entry["what"].endswith(_OLDER) and changes_numbers(entry, value) else ""


def translated(name: str, value: str) -> str:
  """Returns `value` of the key `name`, with MaxText's value for "not set" replaced by the one of this program."""
  return _UNSET.get(name, {}).get(value, value)


@functools.cache
def tables() -> dict[str, Any]:
  """Returns answers.yml."""
  loader: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)  # texts only: true stays "true"
  return yaml.load(Path(__file__).with_name("answers.yml").read_text(), loader)


@functools.cache
def _entries() -> dict[str, dict[str, str]]:
  """{name or pattern: its entry of answers.yml}."""
  groups = tables()["keys"].items()
  return {name: entry | {"what": what} for what, group in groups for entry in group for name in entry["names"].split()}
