"""The README and docs/architecture.md agree with the code: reading path, map of the code, direction of imports."""

from __future__ import annotations

import pathlib
import re

from tests.test_layering import LAYERS

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
MAX_LINES = 1800  # of the reading path


def section(page: str, title: str) -> str:
  found = page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
  assert found, f"no section '{title}'"
  return found


def test_the_reading_path_is_short():
  names = re.findall(r"^\d+\. (?:`|\[)([\w./]+)", section(README, "How it works: a reading path"), flags=re.MULTILINE)
  assert len(names) > 5 and names[-1].startswith("tests/")
  lines = {name: len((ROOT / name).read_text().splitlines()) for name in names}
  assert sum(lines.values()) <= MAX_LINES, lines


def test_the_map_names_every_file_and_folder_of_the_package():
  text = section(README, "A map of the code")
  unnamed = ("__init__.py", "__pycache__", "py.typed")
  entries = [path for path in (ROOT / "src" / "trainer").iterdir() if path.name not in unnamed]
  missing = [path.name for path in entries if f"{path.name}{'/' * path.is_dir()}`" not in text]
  assert missing == []


def test_the_page_shows_the_layers_of_the_import_test():
  text = section((ROOT / "docs" / "architecture.md").read_text(), "Imports point down")
  rows = text.partition("```\n")[2].partition("\n```")[0].splitlines()
  assert [set(row.split(", ")) for row in rows] == [set(layer) for layer in reversed(LAYERS)]
