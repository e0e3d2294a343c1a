"""Writes configs/base.yml and docs/configuration.md from the schema: `python -m trainer.tools.document`."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator

from trainer.config.cli import literal
from trainer.config.config_files import package_root
from trainer.config.keys import Key, all_keys, unwrapped
from trainer.config.schema import Config

_BASE_HEAD = """\
# Every key with its default and meaning. Generated from src/trainer/config/schema.py by
# `.venv/bin/python -m trainer.tools.document`; a test compares the two. The values here are defaults and not choices
# of the user: a model that model_name names replaces them without a conflict.
"""

_PAGE_HEAD = """\
# Configuration

Generated from `src/trainer/config/schema.py` by `.venv/bin/python -m trainer.tools.document`. Do not edit this page.

    .venv/bin/python -m trainer CONFIG.yml key=value ...
    .venv/bin/python -m trainer CONFIG.yml key=value ... --print-config

## Rules

- **Precedence**, lowest first: the defaults below; the files that a YAML names in `base_config` (relative to the YAML);
  the YAML; the YAML of the model (`model_name`); the command line, where the last of several values wins.
- **Models**: another value than the named model's for one of its keys is an error. With `override_model_config=true`
  your value wins. The YAML of a model may also have values that are no keys of a run: `max_position_embeddings` (the
  longest sequence), `normalization_layer_epsilon`, `initializer_range` (standard deviation of fresh matrices),
  `rope_type` (`default`, or `llama3` with `rope_scaling_factor`, `rope_low_freq_factor`, `rope_high_freq_factor` and
  `rope_original_max_position_embeddings`), `norm_topk_prob` (whether the weights of the chosen experts add up to 1),
  `decoder_sparse_step` (every so many layers one has experts) and `mlp_only_layers` (layers without experts, counted
  from 0 and separated by commas).
- **Disabled keys**: a value that disables other keys also removes those keys from lower-precedence files. For example,
  `eval_steps=0` removes the `eval_interval` of a YAML. The keys of a feature that is turned off
  (`elastic_enabled=false`, `enable_checkpointing=false`, `dataset_type=synthetic`, `profiler=`) may stay.
- **Files**: a relative path of a config file starts in the current folder, then in the package, so
  `configs/quickstart.yml` names the same file everywhere. An address works too, such as `gs://BUCKET/RUN/config.yml`.
- **Names**: keys are flat. On the command line `section.key=value`, `--key=value` and `-` for `_` are accepted too.
  MaxText's `dcn_data_parallelism` and `ici_data_parallelism` are accepted where they say what follows from the devices
  and the other sizes.
- **Values** are text until they meet their key: `1e-3` is a number, `none` is a word, and the text after the first `=`
  needs no YAML quotes. `None` for a key that may be empty means empty.
- **Errors**: all independent mistakes are reported at once, each with the value, the rule and the remedy. The program
  exits with code 2 before it touches a device or writes a file. For keys of MaxText that have no meaning here, and for
  options of xpk, gcluster, torchrun and Ray, the message says what to use instead.
"""


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
  return unwrapped(annotation.__doc__) if annotation else ""


def _meaning(key: Key) -> str:
  """The description of a key with its choices or its range."""
  if key.choices:
    return f"{key.description} One of: {', '.join(literal(choice) for choice in key.choices)}."
  bounds = key.bounds.removesuffix(f" and at most {2**31 - 1}")  # the limit of every count tells a reader nothing
  return f"{key.description} ({bounds})" if bounds else key.description


def main() -> None:
  """Writes both files to the repository."""
  if sys.argv[1:]:
    sys.exit(__doc__ + "\nIt takes no arguments.")
  package = package_root()
  page_path = package.parents[1] / "docs/configuration.md"
  for path, text in ((package / "configs/base.yml", base_yaml()), (page_path, page())):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    print(f"wrote {path}")


if __name__ == "__main__":
  main()
