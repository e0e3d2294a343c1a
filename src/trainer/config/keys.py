"""The schema as a flat table of keys, and the conversion of a written value to a key's type.

Values are text until they meet their key: YAML and the command line follow the same rules, and the value of a text key
never becomes a number or a date because of how it looks.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Literal, get_args, get_origin

from trainer.config import answers
from trainer.config.errors import ConfigError, did_you_mean, shorten
from trainer.config.schema import ACTIVATIONS, FOLLOWING, MODEL_VALUES, Config, PreflightOptions

Scalar = bool | int | float | str
# MaxText's switch -> the entry of `services` that it turns on or off.
SWITCHES = {
  "enable_tensorboard": "tensorboard",
  "enable_goodput_recording": "goodput",
  "enable_pathways_goodput": "goodput_json",
  "gcs_metrics": "gcs_metrics",
  "enable_checkpoint_cloud_logger": "checkpoint_logger",
}
# MaxText's keys of DiLoCo -> the key that means the same, and the value that enable_diloco=true gives it.
DILOCO: dict[str, tuple[str, Scalar]] = {
  "diloco_sync_period": ("local_steps", 36),
  "diloco_outer_lr": ("outer_learning_rate", 0.3),
  "diloco_outer_momentum": ("outer_momentum", 0.9),
}
DILOCO_SWITCH = "enable_diloco"


@dataclass(frozen=True)
class Key:
  """One key of the schema.

  `kind` is the type of its values. `choices` lists them if they are few, else it is empty. `limits` holds the range of
  a number as pairs such as ("ge", 1).
  """

  name: str
  section: str
  kind: type
  choices: tuple[str, ...]
  default: Scalar
  description: str
  limits: tuple[tuple[str, float], ...]

  @property
  def bounds(self) -> str:
    """The range in words, such as "at least 1 and at most 100"; empty if there is none."""
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    # Every digit of a whole number: nobody can type the limit 2.14748e+09.
    return " and ".join(
      f"{words[rule]} {limit if isinstance(limit, int) else f'{limit:g}'}" for rule, limit in self.limits
    )

  def allows(self, value: Scalar) -> bool:
    """Whether a value of the key's type is within the range."""
    return all(getattr(operator, rule)(value, limit) for rule, limit in self.limits)


@dataclass(frozen=True)
class Given:
  """A value that the user wrote.

  `origin` is the file and line, or the command line. `explicit` is False if a table of defaults only repeats a default.
  """

  value: Scalar
  origin: str
  explicit: bool = True


@functools.cache
def all_keys() -> dict[str, Key]:
  """Every key of a run by name, in schema order."""
  return {name: key for name, key in all_fields().items() if name not in MODEL_VALUES | FOLLOWING}


@functools.cache
def all_fields() -> dict[str, Key]:
  """The keys, and the other fields of a configuration: MODEL_VALUES and FOLLOWING."""
  return _table({name: field.annotation for name, field in Config.model_fields.items()})


@functools.cache
def accepted() -> dict[str, Key]:
  """The names that a run's YAML or command line may have: the keys, and MaxText's switches and derived keys, and its
  keys of DiLoCo."""
  switch = Key("", "", bool, (), False, "", ())
  fields = {name: key for name, key in all_fields().items() if name not in MODEL_VALUES}
  diloco = {name: replace(fields[key], name=name) for name, (key, _) in DILOCO.items()}
  return fields | diloco | {name: replace(switch, name=name) for name in (*SWITCHES, DILOCO_SWITCH)}


def _table(sections: Mapping[str, Any]) -> dict[str, Key]:
  keys: dict[str, Key] = {}
  for section, fields in sections.items():
    for name, field in fields.model_fields.items():
      kind, choices = _kind(field.annotation)
      default = field.default.value if isinstance(field.default, StrEnum) else field.default
      limits = tuple(
        (rule, getattr(limit, rule))
        for rule in ("ge", "gt", "le", "lt")
        for limit in field.metadata
        if hasattr(limit, rule)
      )
      keys[name] = Key(name, section, kind, choices, default, unwrapped(field.description), limits)
  return keys


def unwrapped(text: str | None) -> str:
  return " ".join((text or "").split())


def _kind(annotation: Any) -> tuple[type, tuple[str, ...]]:
  """(type of the values, choices) of a field's annotation."""
  if get_origin(annotation) is Literal:
    return str, get_args(annotation)
  if isinstance(annotation, type) and issubclass(annotation, StrEnum):
    return str, tuple(member.value for member in annotation)
  assert annotation in (bool, int, float, str), f"a key has the unsupported type {annotation}"
  return annotation, ()


def preflight_options(arguments: Sequence[str]) -> tuple[PreflightOptions, list[str]]:
  """The options of preflight among `arguments`, and the other arguments. Raises ConfigError for a wrong value."""
  known = _table({"preflight": PreflightOptions})
  given: dict[str, Any] = {}
  others: list[str] = []
  for argument in arguments:
    name, equals, text = argument.lstrip("-").partition("=")
    key = known.get(name.replace("-", "_"))
    if equals and key is not None:
      given[key.name] = convert(key, text, "command line").value
    else:
      others.append(argument)
  return PreflightOptions.model_validate(given), others


def as_key(name: str, text: str | None) -> tuple[str, str | None]:
  """The key and its value for MaxText's key of an activation: custom_remat has all of them."""
  activation = name.replace("-", "_").removeprefix("model.")
  if activation not in ACTIVATIONS:
    return name, text
  return "custom_remat", text if text is None else f"{activation}={text}"


def is_answered(name: str) -> bool:
  """Whether `name` is a key, or a key of MaxText for which there is an answer."""
  spelled = as_key(name.replace("-", "_"), None)[0]
  return spelled in all_fields() or spelled in accepted() or answers.remedy_for_key(spelled) != ""


def resolve(name: str, origin: str, *, of_model: bool = False) -> Key:
  """The key with this name; `section.key`, `section.rest` for a key `section_rest`, and - for _ are accepted too.

  of_model: in a file that may have MODEL_VALUES. Raises ConfigError for any other name.
  """
  keys = accepted()
  spelled = name.replace("-", "_")
  if (plain := spelled.removeprefix("model.")) in MODEL_VALUES:
    if of_model:
      return all_fields()[plain]
    raise ConfigError(
      f"{name} ({origin}): this is a value of a model, not a key of a run.\n"
      "Write it in a YAML with all values of the model, and give that as model_name=FILE.yml."
    )
  section, dot, rest = spelled.partition(".")
  if spelled in keys:
    return keys[spelled]
  if dot and rest in keys and keys[rest].section in (section, ""):
    return keys[rest]
  if dot and f"{section}_{rest}" in keys:
    return keys[f"{section}_{rest}"]
  if spelled in PreflightOptions.model_fields:
    raise ConfigError(
      f"{name} ({origin}): this is an option of trainer.tools.preflight, not a key of a run.\n"
      f"Give it on the command line of that tool: python -m trainer.tools.preflight CONFIG.yml {name}=VALUE"
    )
  if remedy := answers.remedy_for_key(spelled):
    raise ConfigError(f"{name} ({origin}): this is a key of MaxText, not of this program.\n{remedy}")
  hint = f"Did you mean {rest}? " if rest in keys else did_you_mean(spelled.replace(".", "_"), all_keys())
  raise ConfigError(
    f"{shorten(name)} ({origin}): there is no such key.\n{hint}configs/base.yml and --help list every key."
  )


def convert(key: Key, text: str, origin: str) -> Given:
  """`text` as a value of the key's type, within its range; ConfigError if it is not one."""
  if text == "None" and key.default == "" and key.kind is str:
    text = ""  # Python's and MaxText's word for "not set"
  if key.choices:
    return Given(_choice(key, text, origin), origin)
  if key.kind is str:
    _check_text(key, text, origin)
  elif not text.isascii():  # Python reads the digits of every script, and a reader of the log may not
    raise ConfigError(f"{key.name}={shorten(text)} ({origin}): a number has the digits 0 to 9.\nWrite it with them.")
  parse, rule, example = _KINDS[key.kind]
  try:
    value = parse(text)
  except ValueError:
    message = f"{key.name}={shorten(text)} ({origin}): {key.name} must be {rule}.\n"
    raise ConfigError(message + (_remedy(key, text) or f"For example: {key.name}={example}")) from None
  if not key.allows(value):
    message = f"{key.name}={shorten(text)} ({origin}): {key.name} must be {key.bounds}.\n"
    raise ConfigError(
      message + (answers.remedy_for_value(key.name, text) or f"Default: {key.default}. {key.description}")
    )
  return Given(value, origin)


def _choice(key: Key, text: str, origin: str) -> str:
  """The choice that `text` means, whatever its case; ConfigError if there is none."""
  if text in key.choices:
    return text
  if text.lower() in key.choices:
    return text.lower()
  if text.lower() in ("none", "null") and "" in key.choices:
    return ""
  shown = ", ".join(choice or "'' (empty)" for choice in key.choices)
  remedy = _remedy(key, text)
  near = did_you_mean(text, [choice for choice in key.choices if choice])
  hint = f"{remedy}\n" if remedy else near
  raise ConfigError(f"{key.name}={shorten(text)} ({origin}): {key.name} has no such value.\n{hint}Choices: {shown}.")


def _check_text(key: Key, text: str, origin: str) -> None:
  """Refuses a value of a text key that only another program's configuration would give a meaning."""
  if key.name in ("sample_prompt", "bos_token", "eos_token"):  # such as [SEP]
    return
  if text and not text.strip():
    raise ConfigError(f"{key.name}={text!r} ({origin}): has only blanks.\nGive a value, or remove the key.")
  if text == "None" or _is_list(text):
    raise ConfigError(f"{key.name}={shorten(text)} ({origin}): {key.name} must be one text.\n{_remedy(key, text)}")


def _is_list(text: str) -> bool:
  return text[:1] + text[-1:] in ("[]", "{}")


def _remedy(key: Key, text: str) -> str:
  """What to write instead of a value that the key cannot have; empty if nothing is known."""
  if remedy := answers.remedy_for_value(key.name, text):
    return remedy
  if text in ("", "None", "none", "null"):
    return f"To use the default, {key.default}, remove the key."
  if _is_list(text):
    return "A key has one value, not a list. Several text files go into one folder."
  return ""


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


# Type of the values -> the function that reads one, the rule, an example.
_KINDS: dict[type, tuple[Any, str, str]] = {
  bool: (_boolean, "true or false", "true"),
  int: (_integer, "a whole number", "10"),
  float: (_real, "a finite number", "0.5"),
  str: (str, "", ""),
}
