"""Cards of results: complete, drawn, and cited; and the command that measures them again."""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.util
import pathlib
import re
import subprocess
import sys

import pytest
from end_to_end import cards, shakespeare, verify_card
from tests.support import needs

from input_pipeline.tokenizer import load_bpe
from trainer.config.load import load

CARDS = cards.cards()
ROOT = cards.ROOT


def test_the_page_is_drawn_from_the_cards():
  page = cards.without_marks(cards.PAGE.read_text())
  assert page == cards.draw(set()), "draw it again: .venv/bin/python -m end_to_end.cards"


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
def test_a_card_is_complete(card):
  if any(path.startswith(f"src/trainer/{name}") for path in card.paths for name in needs.deleted):
    pytest.skip("measures a part that this fork has deleted")
  assert isinstance(card.date, datetime.date) and card.paths and card.not_verified and card.machine and card.versions
  assert card.figures and [path for path in card.paths if not (ROOT / path).exists()] == []
  for name, figure in card.figures.items():
    assert re.compile(figure.pattern).groups == 1, name
    assert figure.holds(figure.value), f"{name}: the card itself is not within its bound"


class Parsed(BaseException):
  """The arguments of a command were accepted."""


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
def test_the_command_of_a_card_is_accepted(card, monkeypatch):
  values = dict.fromkeys(verify_card.WORD.findall(card.command), "value")
  assert "/python -m " in card.command
  _, (_, _, module, *arguments) = verify_card.parts(card.command, values)
  assert importlib.util.find_spec(module), module
  if module == "trainer":
    load(arguments, check_paths=False)
    return
  parse = argparse.ArgumentParser.parse_args

  def parse_and_stop(self, *given):
    parse(self, *given)
    raise Parsed

  if arguments:  # a command without arguments may not parse any
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    with pytest.raises(Parsed):
      found = importlib.import_module(module)
      (found if hasattr(found, "main") else importlib.import_module(f"{module}.__main__")).main()


def test_every_figure_of_the_first_screen_has_a_card():
  screen = (ROOT / "README.md").read_text().partition("\n## Who it is for")[0]
  text = re.sub(r"`[^`]*`|\]\([^)]*\)|kill -9", "", screen).replace("\n", " ")
  for card in CARDS.values():
    for shown in (text for figure in card.figures.values() for text in figure.shown):
      text = text.replace(shown, "")
  assert re.findall(r"(?<!\w)\d\S*", text) == []


def test_every_page_of_measurements_has_commands_and_dates():
  """At its head or in the section, for each section with a table."""
  lacking = []
  for page in sorted((ROOT / "docs" / "benchmarks").glob("[!R]*.md")):
    head, *sections = re.split(r"^## ", page.read_text(), flags=re.MULTILINE)
    for section in [head, *sections]:
      text = head + section
      if "|---" in section and not ("python -m " in text and re.search(r"20\d\d-\d\d-\d\d", text)):
        lacking.append(f"{page.name}: {section.splitlines()[0]}")
  assert lacking == ["experts.md: Experts in 8 bits"]  # kernels that were not kept: there is no command


def card(command: str, bound: str = "<= 1.60", **changes) -> cards.Card:
  figures = {"loss": {"value": 1.55, "bound": bound, "pattern": r"loss ([\d.,]+)"}}
  keys = {"commit": "HEAD", "date": "", "machine": "", "versions": "", "paths": ["README.md"], "not_verified": ""}
  return cards.Card(**{"name": "", "command": command, "figures": figures} | keys | changes)


@pytest.mark.parametrize(
  ("printed", "bound", "code"),
  [
    ("print('loss 1.56')", "<= 1.60", 0),
    ("print('loss 1,560 and loss 1,561')", ">= 1560", 0),
    ("print('loss 1.5, loss 1.7')", "<= 1.60", 1),  # every place counts
    ("print('loss 1.56'); exit(3)", "<= 1.60", 1),
    ("print('nothing')", "<= 1.60", 2),
    ("print(WORD)", "<= 1.60", 2),
  ],
)
def test_a_card_is_run_again(printed, bound, code, monkeypatch, capsys):
  command = f'A=1 .venv/bin/python -c "{printed}"'
  monkeypatch.setattr(cards, "cards", lambda: {"one": card(command, bound)})
  monkeypatch.setattr(sys, "argv", ["verify_card", "one"])
  assert verify_card.main() == code, capsys.readouterr()


def test_a_word_of_the_command_is_replaced():
  command = "X_Y=a .venv/bin/python -m m --text TEXT out=DIR"
  variables, words = verify_card.parts(command, {"TEXT": "a b", "DIR": "/d"})
  assert variables == {"X_Y": "a"} and words[1:] == ["-m", "m", "--text", "a b", "out=/d"]


def test_a_result_is_old_when_its_paths_have_changed_since(tmp_path, monkeypatch):
  def git(*words: str) -> str:
    command = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

  monkeypatch.setattr(cards, "ROOT", tmp_path)
  monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
  assert cards.has_changed(card("")) is None, "not a clone"
  git("init", "-q")
  git("commit", "-q", "--allow-empty", "-m", "measured")
  measured = git("rev-parse", "HEAD")
  (tmp_path / "README.md").write_text("changed")
  git("add", "README.md")
  git("commit", "-q", "-m", "changed")
  cases = [(measured, "README.md"), (measured, "src"), (None, "README.md"), ("1234567", "README.md")]
  assert [cards.has_changed(card("", commit=c, paths=[p])) for c, p in cases] == [True, False, None, None]


def test_characters_of_shakespeare_are_tokens(tmp_path):
  text = "First Citizen:\nYou 'ab' are; no?\n"
  keys = dict(key.split("=", 1) for key in shakespeare.prepare(text.encode(), tmp_path))
  tokenizer = load_bpe(keys["tokenizer_path"])
  ids = tokenizer.encode(text)
  assert len(ids) == len(text) and tokenizer.decode(ids) == text
  assert tokenizer.vocab_size == len(set(text)) + 1
  parts = [pathlib.Path(keys[key]).read_text() for key in ("dataset_path", "eval_dataset_path")]
  assert "".join(parts) == text and len(parts[0]) == int(0.9 * len(text))


def test_another_text_is_refused(tmp_path, monkeypatch, capsys):
  (tmp_path / "input.txt").write_text("First Citizen:\r\n")
  monkeypatch.setattr(sys, "argv", ["shakespeare", "--text", str(tmp_path / "input.txt"), "--folder", str(tmp_path)])
  assert shakespeare.main() == 2 and "sha256" in capsys.readouterr().err
  assert [path.name for path in tmp_path.iterdir()] == ["input.txt"]
