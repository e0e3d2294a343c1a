"""The text that `python -m trainer` prints about the configuration. No JAX is imported, and no file is read."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping

import yaml

from trainer.config.keys import Scalar, all_fields, all_keys
from trainer.config.schema import Config

USAGE = """\
Usage: python -m trainer CONFIG.yml [key=value ...] [--print-config | --help | --version]

Pre-trains a Qwen3 or Llama decoder.

  python -m trainer configs/quickstart.yml               train a small model for two minutes
  python -m trainer configs/quickstart.yml steps=20      change a key
  python -m trainer CONFIG.yml key=value --print-config  print every key and where its value comes from; run nothing
  python -m trainer --help                               describe every key"""

_PRECEDENCE = """\
A key has the value of the command line, else of model_name's YAML, else of CONFIG.yml, else of the files that
CONFIG.yml names as base_config, else the default shown here."""


def help_text() -> str:
  """The usage, then every key with its default, meaning and choices, by section."""
  lines = [USAGE, "", _PRECEDENCE]
  section = ""
  for key in all_keys().values():
    if key.section != section:
      section = key.section
      lines += ["", f"{section}:"]
    lines.append(f"  {key.name}={literal(key.default)}")
    choices = f" One of: {', '.join(literal(choice) for choice in key.choices)}." if key.choices else ""
    lines += textwrap.wrap(key.description + choices, 112, initial_indent="      ", subsequent_indent="      ")
  return "\n".join(lines)


def print_config(config: Config, origins: Mapping[str, str] | None = None) -> str:
  """The resolved configuration as YAML: every key, and other fields that differ from their default. Loading this YAML
  gives the same configuration.

  origins: as of `load_with_origins`; with them, a comment after each value says where the value comes from.
  """
  values, fields = config.flat(), all_fields()
  told = [name for name in values if name in all_keys() or values[name] != fields[name].default]
  lines = {name: f"{name}: {literal(values[name])}" for name in told}
  if origins is None:
    return "".join(f"{line}\n" for line in lines.values())
  return "".join(f"{line:<40}  # {_printable(origins.get(name, 'default'))}\n" for name, line in lines.items())


def _printable(origin: str) -> str:
  """A file name may have characters that would end the comment."""
  return origin if origin.isprintable() else ascii(origin)


def literal(value: Scalar) -> str:
  """The value as YAML on one line, in the shortest form that reads back: plain, 'quoted' or "escaped"."""
  if isinstance(value, bool):
    return str(value).lower()
  if not isinstance(value, str):
    return repr(value)
  # A word that YAML reads as another type (null, 1e3, a date) needs quotes too.
  if re.fullmatch(r"[\w/~]([\w./~+-]| (?! |$))*", value, re.ASCII) and yaml.safe_load(value) == value:
    return value
  if value.isprintable():
    return "'" + value.replace("'", "''") + "'"
  # YAML has the escapes of JSON except surrogate pairs. JSON does not escape DEL and some line separators.
  quoted = json.dumps(value, ensure_ascii=False)
  return re.sub(r"[^ -~]", lambda found: f"\\U{ord(found[0]):08x}", quoted)
