"""What `python -m trainer` prints about the configuration. Text only: no JAX, nothing on disk."""

from __future__ import annotations

import textwrap

from trainer.config.document import literal
from trainer.config.keys import all_keys
from trainer.config.schema import Config

_HELP_HEAD = """\
Usage: python -m trainer CONFIG.yml [key=value ...] [--print-config | --help]

Pre-trains a Qwen3 or Llama decoder. CONFIG.yml is read over configs/base.yml's defaults, then model_name's YAML, then
key=value. Start with: python -m trainer configs/quickstart.yml
"""


def help_text() -> str:
  """Usage, then every key with default, meaning and choices, by section."""
  lines = [_HELP_HEAD.rstrip()]
  section = ""
  for key in all_keys().values():
    if key.section != section:
      section = key.section
      lines += ["", f"{section}:"]
    lines.append(f"  {key.name}={literal(key.default)}")
    choices = f" One of: {', '.join(literal(choice) for choice in key.choices)}." if key.choices else ""
    lines += textwrap.wrap(key.description + choices, 112, initial_indent="      ", subsequent_indent="      ")
  return "\n".join(lines)


def print_config(config: Config) -> str:
  """The resolved configuration as YAML that `python -m trainer` reads back to the same values."""
  return "".join(f"{name}: {literal(value)}\n" for name, value in config.flat().items())
