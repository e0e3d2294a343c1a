"""`python -m trainer.tools.from_maxtext FILE.yml > MINE.yml`: a configuration of MaxText as one of this program.

Keys that both programs have are kept, and renamed keys get their name here. Each other key is listed on stderr with the
reason. docs/coming_from.md has the differences that are no keys.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from trainer.config import answers, files
from trainer.config.document import literal
from trainer.config.errors import ConfigError
from trainer.config.keys import accepted, convert, resolve
from trainer.config.load import load
from trainer.config.schema import ACTIVATIONS
from trainer.observe import screen

_FAMILIES = {"llama2": "llama", "qwen3": "qwen3", "qwen3_moe": "qwen3"}  # decoder_block: how names of its models begin
_PARENT = "base.yml"  # MaxText's defaults; the file of the same name here has ours


@dataclass(frozen=True)
class Converted:
  """kept: our keys as YAML. left_out: keys without which the numbers stay the same; lost: the others. With reasons."""

  kept: dict[str, str] = field(default_factory=dict)
  left_out: dict[str, str] = field(default_factory=dict)
  lost: dict[str, str] = field(default_factory=dict)


def main(argv: list[str] | None = None) -> int:
  """Returns the exit code: 0, or 2 if a key that changes the numbers of the run cannot be kept."""
  parser = argparse.ArgumentParser(prog="python -m trainer.tools.from_maxtext", description=__doc__.split("\n\n")[0])
  parser.add_argument("file", metavar="FILE.yml", type=os.path.expanduser)
  path = Path(parser.parse_args(argv).file)
  try:
    texts = {name: text for name, (text, _) in files.read_yaml(path).items()}
    result = convert_keys(texts, _values(path))
    kept = "".join(f"{name}: {value}\n" for name, value in result.kept.items())
    if not result.lost:
      _check(kept)
  except (ConfigError, OSError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  print(kept, end="")
  for title, reasons in (("left out", result.left_out), ("cannot be kept", result.lost)):
    for name, reason in reasons.items():
      print(f"{title}: {name}: {' '.join(reason.split())}", file=sys.stderr)
  return 2 if result.lost else 0


def _values(path: Path) -> dict[str, object]:
  """The values of a YAML mapping. ConfigError for a tag or a date that YAML does not have."""
  try:
    return yaml.safe_load(path.read_text()) or {}
  except (yaml.YAMLError, ValueError) as error:
    reason = str(error).splitlines()[0]
    raise ConfigError(f"{path}: a value cannot be read: {reason}. Write it as text, in quotes.") from None


def convert_keys(given: Mapping[str, str | None], raw: Mapping[str, object]) -> Converted:
  """Sorts the keys of a YAML of MaxText. given: {key: text, or None for a list or a mapping, which `raw` has}."""
  result = Converted()
  for name, text in given.items():
    value = str(raw[name]) if text is None else text
    answer = answers.answer_for(name)
    if name == files.PARENT_KEY:
      if Path(value).name == _PARENT:
        result.kept[name] = _PARENT
      else:
        result.lost[name] = f"{value} is a file of MaxText. Convert it too, and name the result here."
    elif name == "decoder_block" and value in _FAMILIES and str(given.get("model_name")).startswith(_FAMILIES[value]):
      result.left_out[name] = f"={value}: model_name={given['model_name']} is of this family."
    elif name in ACTIVATIONS:
      if given.get("remat_policy") == "custom":
        result.kept[name] = value
      else:
        result.left_out[name] = f"={value}: counts only with remat_policy=custom."
    elif name in accepted():
      _keep(result, name, name, value)
    elif answer is None:
      result.lost[name] = f"={value}: no such key is known. Remove it if the run does not depend on it."
    elif answer.renamed:
      _keep(result, name, answer.renamed, value)
    elif answer.changes_numbers(value):
      result.lost[name] = f"={value}: {answer.remedy}"
    else:
      result.left_out[name] = f"={value}: {answer.remedy}"
  return result


def _keep(result: Converted, name: str, ours: str, value: str) -> None:
  """Gives our key the value, unless it is not set, or has no meaning here."""
  if (ours, value) == ("num_slices", "-1"):
    value = "0"
  if value in ("", "None") and accepted()[ours].kind is not str:
    result.left_out[name] = "is not set."
    return
  try:
    result.kept[ours] = literal(convert(resolve(ours, "FILE"), value, "FILE").value)
  except ConfigError as error:
    result.lost[name] = str(error)


def _check(kept: str) -> None:
  """Raises ConfigError if the keys of a YAML text do not fit each other here."""
  with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "converted.yml"
    file.write_text(kept)
    load([str(file)], check_paths=False)


if __name__ == "__main__":
  screen.command(main)
