"""README.md and docs/architecture.md agree with the code."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterable

import pytest
from tests.support import house, needs
from tests.test_layering import PACKAGES

ROOT = pathlib.Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SOURCE = ROOT / "src"


def section(page: str, title: str) -> str:
  found = page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
  assert found, f"no section '{title}'"
  return found


def test_the_reading_path_is_short():
  text = section(README, "How it works: a reading path")
  names = re.findall(r"^\d+\. (?:`|\[)([\w./]+)", text, flags=re.MULTILINE)
  assert len(names) > 5 and names[-1].startswith("tests/")
  lines = {name: len((ROOT / name).read_text().splitlines()) for name in names}
  stated = re.search(r"Together they have at most ([\d,]+) lines", text)
  assert stated and sum(lines.values()) <= int(stated[1].replace(",", "")) <= 1690, lines


def test_the_page_names_every_file_and_folder_of_the_package():
  text = (ROOT / "docs" / "architecture.md").read_text()
  unnamed = ("__init__.py", "__pycache__", "py.typed")
  entries = [path for path in (ROOT / "src" / "trainer").iterdir() if path.name not in unnamed]
  missing = [path.name for path in entries if f"{path.name}{'/' * path.is_dir()}`" not in text]
  assert missing == []


def lines_of(paths: Iterable[pathlib.Path]) -> int:
  return sum(len(path.read_text().splitlines()) for path in paths)


@needs.workshop
def test_the_readme_says_how_large_the_code_is():
  stated = re.search(r"has ([\d,]+) lines of Python.*? have ([\d,]+) of them.*? have\s([\d,]+)\.", README, re.DOTALL)
  assert stated
  path = re.findall(r"\]\((src/trainer/[\w/]+\.py)\)", section(README, "How it works: a reading path"))
  beside = [SOURCE / name for name in PACKAGES if name != "trainer"]
  sizes = [
    lines_of((SOURCE / "trainer").rglob("*.py")),
    lines_of(ROOT / name for name in path),
    lines_of(file for package in beside for file in package.rglob("*.py")),
  ]
  assert [int(number.replace(",", "")) for number in stated.groups()] == pytest.approx(sizes, rel=0.05)


@needs.workshop
def test_the_page_of_alerts_has_the_metrics_that_are_served():
  from trainer.report import exporter

  served = {f"trainer_{name}{'_total' * counts}" for name, (_, counts) in exporter._METRICS.items()}
  named = set(re.findall(r"\btrainer_\w+", section((ROOT / "docs" / "records.md").read_text(), "Alerts")))
  assert named == served | {exporter._AGE[0]}


@needs.workshop
def test_the_picture_of_the_house_is_that_of_the_imports():
  assert len(house.floors(house.needs())) <= 12
  drawn = house.picture(house.needs())
  assert house.PICTURE.read_text() == drawn, "draw it again: .venv/bin/python -m tests.support.house"
