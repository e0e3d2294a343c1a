"""Draws docs/results/README.md from the cards, docs/results/*.yml, and marks results whose code has changed since.

  python -m end_to_end.cards

A card is a result that `python -m end_to_end.verify_card NAME` measures again; NAME is the name of its file. Its keys:

  name          the result in one line
  command       prints the figures; words in capital letters are places that the reader has to give
  commit, date  when it was measured. commit may be null: not recorded
  machine, versions
  figures       by name: value; bound, such as <= 1.6, for a run on a machine like that one; pattern, a regular
                expression that finds the figure in what the command prints, as its group, in one place or several;
                shown, the texts with which README.md quotes it
  paths         the code that decides the result
  not_verified  what the result does not show
"""

from __future__ import annotations

import dataclasses
import operator
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "results"
PAGE = FOLDER / "README.md"
_COMPARE = {"<=": operator.le, ">=": operator.ge, "==": operator.eq}
_MARK = " (**old**)"
_HEAD = """# Results that can be measured again
Each row is a card, a file of this folder, which also has versions, machine, and the paths of the code that decides.
`.venv/bin/python -m end_to_end.verify_card NAME` runs its command and compares the figures with their bounds. Give
words in capital letters as `WORD=VALUE`. `.venv/bin/python -m end_to_end.cards` draws this page, and marks as old the
results whose code has changed since.

| card | result | figures (bounds) | command | measured | not verified |
|---|---|---|---|---|---|
"""


@dataclasses.dataclass(frozen=True)
class Figure:
  value: float
  bound: str
  pattern: str
  shown: tuple[str, ...] = ()

  def holds(self, value: float) -> bool:
    comparison, _, limit = self.bound.partition(" ")
    return bool(_COMPARE[comparison](value, float(limit)))

  def found(self, output: str) -> list[float]:
    return [float(text.replace(",", "")) for text in re.findall(self.pattern, output, re.MULTILINE)]


@dataclasses.dataclass(frozen=True)
class Card:
  name: str
  command: str
  commit: str | None
  date: Any
  machine: str
  versions: str
  figures: dict[str, Figure]
  paths: list[str]
  not_verified: str

  def __post_init__(self) -> None:
    figures = {name: Figure(**keys | {"shown": tuple(keys.get("shown", ()))}) for name, keys in self.figures.items()}
    object.__setattr__(self, "figures", figures)


def cards() -> dict[str, Card]:
  return {path.stem: Card(**yaml.safe_load(path.read_text())) for path in sorted(FOLDER.glob("*.yml"))}


def has_changed(card: Card) -> bool | None:
  """Whether commits after the card's changed its paths. None: unknown, as this is no clone that has the commit."""
  command = ["git", "log", "--format=%h", f"{card.commit}..HEAD", "--", *card.paths]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
  return bool(done.stdout.strip()) if card.commit and done.returncode == 0 else None


def row(name: str, card: Card, old: bool) -> str:
  figures = "; ".join(f"{what}: {figure.value:,} ({figure.bound})" for what, figure in card.figures.items())
  measured = f"{card.date}, {f'commit {card.commit}' if card.commit else 'commit not recorded'}{_MARK * old}"
  cells = [f"[{name}]({name}.yml)", card.name, figures, f"`{card.command}`", measured, card.not_verified]
  return f"| {' | '.join(cells)} |\n"


def draw(old: set[str]) -> str:
  return _HEAD + "".join(row(name, card, name in old) for name, card in cards().items())


def without_marks(page: str) -> str:
  return page.replace(_MARK, "")


def main() -> int:
  changed = {name: has_changed(card) for name, card in cards().items()}
  for name, state in changed.items():
    print(f"{name}: " + {None: "unknown: no git clone that has its commit", True: "old", False: "current"}[state])
  PAGE.write_text(draw({name for name, state in changed.items() if state}))
  return 0


if __name__ == "__main__":
  sys.exit(main())
