"""docs/troubleshooting.md has every class of errors and every runtime meaning, and the program has all of its lines."""

from __future__ import annotations

import ast
import functools
import pathlib
import re

from tests.pages.test_pages import section
from tests.support import needs

from trainer.process import runtime_errors

ROOT = pathlib.Path(__file__).parents[2]
SOURCE = ROOT / "src"
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()


@functools.cache
def trees() -> dict[pathlib.Path, ast.Module]:
  """The modules of all packages, by their path in src/."""
  return {path.relative_to(SOURCE): ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}


@functools.cache
def error_classes() -> set[str]:
  """Classes of exceptions: a base is an exception of Python or of the packages."""
  bases = {
    node.name: {ast.unparse(base).rpartition(".")[2] for base in node.bases}
    for tree in trees().values()
    for node in ast.walk(tree)
    if isinstance(node, ast.ClassDef)
  }
  errors = {"Exception", "RuntimeError", "ValueError", "OSError", "KeyError", "TypeError", "ConnectionError"}
  while more := {name for name, of in bases.items() if of & errors} - errors:
    errors |= more
  return errors & bases.keys()


def first_column() -> set[str]:
  """The words in backquotes in the first column of all tables: lines, errors, keys."""
  rows = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| ")]
  return {word for cell in rows for word in re.findall(r"`([^`]+)`", cell)}


def test_every_class_of_errors_has_a_row():
  names = error_classes()
  assert {"ConfigError", "NoGoodCheckpoint", "SliceHang"} <= names
  assert {name for name in names if f"`{name}`" not in PAGE} == set()


@needs.workshop
def test_the_program_has_every_line_and_every_error_of_the_page():
  texts = [
    node.value
    for tree in trees().values()
    for node in ast.walk(tree)
    if isinstance(node, ast.Constant) and isinstance(node.value, str)
  ]
  named = first_column() - error_classes() - {"TimeoutError"}
  assert len(named) >= 60
  pieces = {piece.strip(" :(),;.") for line in named for piece in line.split("...")} - {""}
  assert sorted(piece for piece in pieces if not any(piece in text for text in texts)) == []


def test_every_meaning_of_a_runtime_error_has_a_row():
  reasons = [reason for _, _, reason in runtime_errors._TABLE] + [runtime_errors.explain("")[1]]
  table = section(PAGE, "What the runtime's errors mean")
  assert [reason for reason in reasons if f"| {reason} |" not in table] == []
