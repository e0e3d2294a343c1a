"""Writes configs/base.yml and docs/configuration.md from the schema: `python -m trainer.config.document`."""

from __future__ import annotations

import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterator

import yaml

from trainer.config.files import repository_root
from trainer.config.keys import Key, Scalar, all_keys
from trainer.config.schema import Config

_BASE_HEAD = """\
# Every key with its default and meaning. Generated from src/trainer/config/schema.py by
# `python -m trainer.config.document`; a test keeps the two equal. Values here are defaults, not choices: a model
# named with model_name replaces them without a conflict.
"""

_PAGE_HEAD = """\
# Configuration

Generated from `src/trainer/config/schema.py` by `python -m trainer.config.document`; do not edit.

    python -m trainer CONFIG.yml key=value ...
    python -m trainer CONFIG.yml key=value ... --print-config

Precedence, lowest first: the defaults below, the files named by a YAML's `base_config` line (relative to that file),
the YAML, the model's YAML (`model_name`), the command line, where the last of several wins. A key with another value
than the named model's is an error, unless `override_model_config=true` lets it win. A choice takes what it leaves
without effect out of the places below it: `eval_steps=0` needs no word about a YAML's `eval_interval`. The keys of
what a switch turns off (`elastic_enabled=false`, `enable_checkpointing=false`, `dataset_type=synthetic`, `profiler=`)
may stay, so that it can be turned on again. A config file is found relative to the working directory, then to the
repository's root. Keys are flat; `section.key=value` is accepted on the command line too. Values are text until they
meet their key: `1e-3` is a number, `none` is a word, and nothing after the first `=` needs YAML quotes.
"""


def literal(value: Scalar) -> str:
  """The value as YAML on one line, as short as any reader of YAML gets it back: plain, 'quoted' or "escaped"."""
  if isinstance(value, bool):
    return str(value).lower()
  if not isinstance(value, str):
    return repr(value)
  # A word that YAML takes for something else (null, 1e3, a date) is no plain string either.
  if re.fullmatch(r"[\w/~]([\w./~+-]| (?! |$))*", value, re.ASCII) and yaml.safe_load(value) == value:
    return value
  if value.isprintable():
    return "'" + value.replace("'", "''") + "'"
  # JSON's escapes are YAML's, but for surrogate pairs, and JSON leaves DEL and other separators of lines as they are.
  quoted = json.dumps(value, ensure_ascii=False)
  return re.sub(r"[^ -~]", lambda found: f"\\U{ord(found[0]):08x}", quoted)


def base_yaml() -> str:
  """The text of configs/base.yml."""
  lines = [_BASE_HEAD.rstrip()]
  for section, keys in _sections():
    lines += ["", f"# --- {section}: {_summary(section)}"]
    for key in keys:
      lines += ["", *textwrap.wrap(_meaning(key), 116, initial_indent="# ", subsequent_indent="# ")]
      lines.append(f"{key.name}: {literal(key.default)}")
  return "\n".join(lines) + "\n"


def page() -> str:
  """The text of docs/configuration.md."""
  lines = [_PAGE_HEAD.rstrip()]
  for section, keys in _sections():
    lines += ["", f"## {section}", "", _summary(section), "", "| key | default | meaning |", "|---|---|---|"]
    lines += [f"| `{key.name}` | `{literal(key.default)}` | {_meaning(key)} |" for key in keys]
  return "\n".join(lines) + "\n"


def _sections() -> Iterator[tuple[str, list[Key]]]:
  for section in Config.model_fields:
    yield section, [key for key in all_keys().values() if key.section == section]


def _summary(section: str) -> str:
  annotation = Config.model_fields[section].annotation
  return inspect.cleandoc(annotation.__doc__ or "") if annotation else ""


def _meaning(key: Key) -> str:
  """The description with the choices or the range of the values."""
  if key.choices:
    return f"{key.description} One of: {', '.join(literal(choice) for choice in key.choices)}."
  return f"{key.description} ({key.bounds})" if key.bounds else key.description


def main() -> None:
  """Writes both files into the repository."""
  if sys.argv[1:]:
    sys.exit(__doc__ + "\nIt takes no arguments.")
  root = repository_root()
  for path, text in ((root / "configs/base.yml", base_yaml()), (root / "docs/configuration.md", page())):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    print(f"wrote {path}")


if __name__ == "__main__":
  main()
