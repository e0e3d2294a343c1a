"""docs/troubleshooting.md has a row for every class of errors, runtime meaning, and part that refuses wrong input."""

from __future__ import annotations

import ast
import functools
import pathlib
import re

from tests.pages.test_pages import section

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


def refusing_parts() -> set[str]:
  """`config/`, `library.py`, `input_pipeline`: what makes a ConfigError, by folders and files of the trainer."""

  def name(path: pathlib.Path) -> str:
    if path.parts[0] == "input_pipeline":
      return path.parts[0]
    return f"{path.parts[1]}/" if len(path.parts) > 2 else path.name

  return {
    name(path)
    for path, tree in trees().items()
    if path.parts[0] in ("trainer", "input_pipeline")
    for node in ast.walk(tree)
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("ConfigError", "TopologyError"))
  }


def first_column(title: str) -> set[str]:
  """The words in backquotes in the first column of the tables of a section."""
  rows = [line.split("|")[1] for line in section(PAGE, title).splitlines() if line.startswith("| ")]
  return {word for cell in rows for word in re.findall(r"`([^`]+)`", cell)}


def test_every_class_of_errors_has_a_row():
  names = error_classes()
  assert {"ConfigError", "NoGoodCheckpoint", "SliceHang"} <= names
  assert {name for name in names if f"`{name}`" not in PAGE} == set()


def test_every_error_that_the_page_names_exists():
  named = first_column("Errors that end a run") | first_column("Errors that a run recovers from")
  assert named - error_classes() <= {"TimeoutError"}


def test_every_part_that_refuses_wrong_input_has_a_row_and_every_row_is_of_such_a_part():
  assert first_column("Wrong input") - {"src/trainer"} == refusing_parts()


def test_every_meaning_of_a_runtime_error_has_a_row():
  reasons = [reason for _, _, reason in runtime_errors._TABLE] + [runtime_errors.explain("")[1]]
  table = section(PAGE, "What the runtime's errors mean")
  assert [reason for reason in reasons if f"| {reason} |" not in table] == []


def test_every_exit_code_has_a_row():
  codes = set(re.findall(r"^\| (\d+) \|", section((ROOT / "README.md").read_text(), "Exit codes"), flags=re.MULTILINE))
  assert len(codes) == 8
  assert codes <= set(re.findall(r"^\| (\d+) \|", section(PAGE, "By exit code"), flags=re.MULTILINE))
