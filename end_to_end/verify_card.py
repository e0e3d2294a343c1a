"""Runs the command of a card of docs/results again, and compares what it prints with the bounds of the card.

  python -m end_to_end.verify_card NAME [WORD=VALUE ...]

WORD=VALUE replaces a word in capital letters of the command, such as TEXT=input.txt. Exits with 0 if all figures are
within their bounds, with 1 if a figure is not or the command fails after it printed all figures, and with 2 if the
command lacks a word or does not print a figure.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping

from end_to_end import cards

WORD = re.compile(r"(?<![\w/.-])[A-Z][A-Z_]+(?![\w/.=-])")


def parts(command: str, values: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
  """Environment variables and arguments of the command of a card, with this interpreter.

  Raises ValueError if `values` lacks a word in capital letters.
  """
  lacks = [f"{word}=VALUE" for word in WORD.findall(command) if word not in values]
  if lacks:
    raise ValueError(f"give {' '.join(lacks)} for the command of the card: {command}")
  words = shlex.split(WORD.sub(lambda word: shlex.quote(values[word[0]]), command))
  python = next(at for at, word in enumerate(words) if "=" not in word)
  return dict(word.split("=", 1) for word in words[:python]), [sys.executable, *words[python + 1 :]]


def compare(card: cards.Card, output: str) -> int:
  """Prints each figure with its bound, and returns the exit code."""
  code = 0
  for name, figure in card.figures.items():
    found = figure.found(output)
    wrong = [value for value in found if not figure.holds(value)]
    state = "NOT PRINTED" if not found else "OUT OF BOUNDS" if wrong else "within bounds"
    code = max(code, 2 if not found else 1 if wrong else 0)
    print(f"{name}: {', '.join(map(str, wrong or found[-1:]))} ({figure.bound}; the card has {figure.value}): {state}")
  return code


def main() -> int:
  known = cards.cards()
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("name", choices=known)
  parser.add_argument("values", nargs="*", metavar="WORD=VALUE")
  given = parser.parse_args()
  card = known[given.name]
  try:
    variables, command = parts(card.command, dict(value.partition("=")[::2] for value in given.values))
  except ValueError as error:
    print(f"{given.name}: {error}", file=sys.stderr)
    return 2
  pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
  with subprocess.Popen(command, cwd=cards.ROOT, env=os.environ | variables, text=True, **pipes) as process:
    lines = []
    for line in process.stdout:
      print(line, end="", flush=True)
      lines.append(line)
  return max(compare(card, "".join(lines)), int(process.returncode != 0))


if __name__ == "__main__":
  sys.exit(main())
