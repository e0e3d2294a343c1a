"""The reading path in the README stays short."""

from __future__ import annotations

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
MAX_LINES = 1800


def test_the_reading_path_has_at_most_1800_lines():
  section = (ROOT / "README.md").read_text().partition("## How it works: a reading path")[2].partition("\n## ")[0]
  entries = re.findall(r"^\d+\. (?:`|\[)([\w./]+)", section, flags=re.MULTILINE)
  assert len(entries) > 5 and entries[-1].startswith("tests/")
  lines = {name: len((ROOT / name).read_text().splitlines()) for name in entries}
  assert sum(lines.values()) <= MAX_LINES, lines
