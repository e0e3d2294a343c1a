"""What to do instead of MaxText's keys, and of its values of common keys, that this program lacks (answers.yml)."""

from __future__ import annotations

import functools
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml


def remedy_for_key(name: str) -> str:
  """Returns what to do instead of giving the key `name` of MaxText; "" for other names.

  name: with _ for -, and perhaps with a section, which makes no difference.
  """
  name = name.rpartition(".")[2]
  remedies = all_keys()
  return remedies.get(name) or next((remedies[pattern] for pattern in remedies if fnmatchcase(name, pattern)), "")


def remedy_for_value(name: str, value: str) -> str:
  """Returns what to do instead of giving MaxText's `value` of the key `name`; "" for other values."""
  for row, remedy in tables()["values"].items():
    key, _, patterns = row.partition("=")
    if key == name and any(fnmatchcase(value, pattern) for pattern in patterns.split()):
      return str(remedy)
  return ""


@functools.cache
def all_keys() -> dict[str, str]:
  """Returns {name or pattern: what to do instead}."""
  return {name: remedy for names, remedy in tables()["keys"].items() for name in names.split()}


@functools.cache
def tables() -> dict[str, Any]:
  loader: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)  # texts only: true stays "true"
  return yaml.load(Path(__file__).with_name("answers.yml").read_text(), loader)
