"""Measures a result of README again, or lists all results and says which of them are older than their code.

  python -m end_to_end.cards [NAME [WORD=VALUE ...]]

A card, docs/results/NAME.yml, has these keys:

  name          the result in one line
  command       prints the figures; WORD=VALUE replaces a word in capital letters
  commit, date, machine, versions: of the measurement
  figures       by name: value; bound, such as <= 1.6, for a run on a machine like that one; pattern, a regular
                expression that finds the figure in what the command prints, in one place or several
  paths         the code that decides the result
  not_verified  what the result does not show

Exits with 0 if all figures are within their bounds, with 1 if a figure is not or the command fails, and with 2 if the
command lacks a word or does not print a figure.
"""

from __future__ import annotations

import argparse
import operator
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import yaml
from tests.support.command import ROOT

COMPARE = {"<=": operator.le, ">=": operator.ge, "==": operator.eq}
WORD = re.compile(r"(?<![\w/.-])[A-Z][A-Z_]+(?![\w/.=-])")
Card = dict[str, Any]


def read() -> dict[str, Card]:
  return {path.stem: yaml.safe_load(path.read_text()) for path in sorted((ROOT / "docs" / "results").glob("*.yml"))}


def is_old(card: Card) -> bool | None:
  """Whether commits after the card's changed its paths. None: unknown, this is no clone that has the commit."""
  command = ["git", "log", "--format=%h", f"{card['commit']}..HEAD", "--", *card["paths"]]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
  return bool(done.stdout.strip()) if card["commit"] and done.returncode == 0 else None


def parts(command: str, values: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
  """Environment variables and arguments of a card's command, with this interpreter. KeyError: a word has no value."""
  words = shlex.split(WORD.sub(lambda word: shlex.quote(values[word[0]]), command))
  python = next(at for at, word in enumerate(words) if "=" not in word)
  return dict(word.split("=", 1) for word in words[:python]), [sys.executable, *words[python + 1 :]]


def compare(card: Card, output: str) -> int:
  """Prints each figure with its bound, and returns the exit code."""
  code = 0
  for name, figure in card["figures"].items():
    comparison, limit = figure["bound"].split()
    found = [float(text.replace(",", "")) for text in re.findall(figure["pattern"], output, re.MULTILINE)]
    wrong = [value for value in found if not COMPARE[comparison](value, float(limit))]
    code = max(code, 2 if not found else 1 if wrong else 0)
    state = "NOT PRINTED" if not found else "OUT OF BOUNDS" if wrong else "within bounds"
    print(f"{name}: {wrong or found[-1:]} ({figure['bound']}; the card has {figure['value']}): {state}")
  return code


def measure(card: Card, values: Mapping[str, str]) -> int:
  """Runs the command of the card, shows what it prints, and returns the exit code."""
  try:
    variables, command = parts(card["command"], values)
  except KeyError as error:
    print(f"Give {error.args[0]}=VALUE for the command of the card: {card['command']}", file=sys.stderr)
    return 2
  pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
  lines: list[str] = []
  with subprocess.Popen(command, cwd=ROOT, env=os.environ | variables, **pipes) as process:
    for line in process.stdout or ():
      print(line, end="", flush=True)
      lines.append(line)
  return max(compare(card, "".join(lines)), int(process.returncode != 0))


def main() -> int:
  cards = read()
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("name", nargs="?", choices=cards)
  parser.add_argument("values", nargs="*", metavar="WORD=VALUE")
  given = parser.parse_args()
  if given.name:
    return measure(cards[given.name], dict(value.partition("=")[::2] for value in given.values))
  for name, card in cards.items():
    state = {None: "unknown", True: "older than its code", False: "current"}[is_old(card)]
    print(f"{name}: {card['name']} ({card['date']}, {card['commit']}: {state})")
  return 0


if __name__ == "__main__":
  sys.exit(main())
