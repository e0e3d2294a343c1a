"""The schema as a flat table of keys, and the conversion of a written value to a key's type.

Values are text until they meet their key: YAML and the command line share one set of rules, and a string key never
turns into a number or a date because of how it looks.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, get_args, get_origin

from trainer.config.errors import ConfigError, did_you_mean, shorten
from trainer.config.maxtext import reason_for, reason_for_value
from trainer.config.schema import Config

Scalar = bool | int | float | str


@dataclass(frozen=True)
class Key:
  """One key of the schema. `kind` is the type of its values; `choices` are all of them when they are few, else ()."""

  name: str
  section: str
  kind: type
  choices: tuple[str, ...]
  default: Scalar
  description: str
  bounds: str  # "at least 1", "above 0", ... or ""


@dataclass(frozen=True)
class Given:
  """A value that somebody wrote: `origin` says where; `explicit` is false where a table of defaults restates one."""

  value: Scalar
  origin: str
  explicit: bool = True


@functools.cache
def all_keys() -> dict[str, Key]:
  """Every key by name, in schema order."""
  keys: dict[str, Key] = {}
  for section, section_field in Config.model_fields.items():
    assert section_field.annotation is not None
    for name, field in section_field.annotation.model_fields.items():
      kind, choices = _kind(field.annotation)
      default = field.default.value if isinstance(field.default, StrEnum) else field.default
      keys[name] = Key(name, section, kind, choices, default, field.description or "", _bounds(field.metadata))
  return keys


def _kind(annotation: Any) -> tuple[type, tuple[str, ...]]:
  if get_origin(annotation) is Literal:
    return str, get_args(annotation)
  if isinstance(annotation, type) and issubclass(annotation, StrEnum):
    return str, tuple(member.value for member in annotation)
  assert annotation in (bool, int, float, str), f"a key has the unsupported type {annotation}"
  return annotation, ()


def _bounds(metadata: list[Any]) -> str:
  words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
  limits = [(text, getattr(rule, name)) for name, text in words.items() for rule in metadata if hasattr(rule, name)]
  # A whole number digit by digit: 2.14748e+09 is no limit to type.
  return " and ".join(f"{text} {limit if isinstance(limit, int) else f'{limit:g}'}" for text, limit in limits)


def resolve(name: str, origin: str) -> Key:
  """The key that `name` means: its own name, or `section.key`, or `section.rest` for a key `section_rest`."""
  keys = all_keys()
  if name in keys:
    return keys[name]
  section, dot, rest = name.partition(".")
  if dot and rest in keys and keys[rest].section == section:
    return keys[rest]
  if dot and f"{section}_{rest}" in keys:
    return keys[f"{section}_{rest}"]
  reason = reason_for(name)
  if reason:
    raise ConfigError(f"{name} ({origin}): {name} has no meaning here.\n{reason}")
  hint = did_you_mean(name.replace(".", "_"), keys) or did_you_mean(rest, keys)
  raise ConfigError(
    f"{shorten(name)} ({origin}): there is no such key.\n{hint}Every key is in configs/base.yml and --help."
  )


def convert(key: Key, text: str, origin: str) -> Given:
  """`text` as a value of the key's type; ConfigError when it is none."""
  try:
    return Given(_PARSERS[key.kind](text), origin) if not key.choices else _choice(key, text, origin)
  except ValueError as error:
    if isinstance(error, ConfigError):
      raise
    rule, example = _RULES[key.kind]
    message = f"{key.name}={shorten(text)} ({origin}): {key.name} must be {rule}.\nFor example: {key.name}={example}"
    raise ConfigError(message) from None


def _choice(key: Key, text: str, origin: str) -> Given:
  if text in key.choices:
    return Given(text, origin)
  if text.lower() in key.choices:
    return Given(text.lower(), origin)
  shown = ", ".join(choice or "'' (empty)" for choice in key.choices)
  raise ConfigError(
    f"{key.name}={shorten(text)} ({origin}): {key.name} has no such value.\n{_instead(key, text)}Choices: {shown}."
  )


def _instead(key: Key, text: str) -> str:
  """What to write for a value that does not exist, as the middle of an error message."""
  reason = reason_for_value(key.name, text)
  return f"{reason}\n" if reason else did_you_mean(text, [choice for choice in key.choices if choice])


def _boolean(text: str) -> bool:
  if text not in ("true", "True", "TRUE", "false", "False", "FALSE"):
    raise ValueError(text)
  return text.lower() == "true"


def _integer(text: str) -> int:
  try:
    return int(text)
  except ValueError:
    number = float(text)
    if not number.is_integer():
      raise
    return int(number)


def _real(text: str) -> float:
  number = float(text)
  if not math.isfinite(number):
    raise ValueError(text)
  return number


_PARSERS: dict[type, Any] = {bool: _boolean, int: _integer, float: _real, str: str}
_RULES: dict[type, tuple[str, str]] = {
  bool: ("true or false", "true"),
  int: ("a whole number", "10"),
  float: ("a finite number", "0.5"),
}
