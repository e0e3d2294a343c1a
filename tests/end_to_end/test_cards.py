"""Cards of results: their commands exist, and the command that measures them again compares."""

from __future__ import annotations

import importlib.util
import re

import pytest
from end_to_end import cards
from tests.support import needs

CARDS = cards.read()


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
def test_a_card_has_a_command_and_is_within_its_bounds(card):
  if any(path.startswith(f"src/trainer/{name}") for path in card["paths"] for name in needs.deleted):
    pytest.skip("measures a part that this fork has deleted")
  _, words = cards.parts(card["command"], dict.fromkeys(cards.WORD.findall(card["command"]), "value"))
  assert words[1] == "-m" and importlib.util.find_spec(words[2])
  assert [path for path in card["paths"] if not (cards.ROOT / path).exists()] == []
  for figure in card["figures"].values():
    comparison, limit = figure["bound"].split()
    assert cards.COMPARE[comparison](figure["value"], float(limit)) and re.compile(figure["pattern"]).groups == 1


@pytest.mark.parametrize(
  ("printed", "code"),
  [
    ("print('loss 1.56')", 0),
    ("print('loss 1.5, loss 1.7')", 1),
    ("print('loss 1.5'); exit(3)", 1),
    ("print(WORD)", 2),
  ],
)
def test_a_card_is_measured_again(printed, code, capsys):
  figures = {"loss": {"value": 1.55, "bound": "<= 1.60", "pattern": r"loss ([\d.,]+)"}}
  found = cards.measure({"command": f'A=1 .venv/bin/python -c "{printed}"', "figures": figures}, {})
  assert found == code, capsys.readouterr()
