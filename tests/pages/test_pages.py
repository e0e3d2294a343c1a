"""docs/architecture.md and docs/records.md agree with the code."""

from __future__ import annotations

import pathlib
import re

from tests.support import needs

ROOT = pathlib.Path(__file__).parents[2]
SOURCE = ROOT / "src"


def test_the_page_names_every_file_and_folder_of_the_package():
  text = (ROOT / "docs" / "architecture.md").read_text()
  unnamed = ("__init__.py", "__pycache__", "py.typed")
  entries = [path for path in (ROOT / "src" / "trainer").iterdir() if path.name not in unnamed]
  missing = [path.name for path in entries if f"{path.name}{'/' * path.is_dir()}`" not in text]
  assert missing == []


@needs.workshop
def test_the_page_of_alerts_has_the_metrics_that_are_served():
  from trainer.report import exporter

  served = {f"trainer_{name}{'_total' * counts}" for name, (_, counts) in exporter._METRICS.items()}
  alerts = (ROOT / "docs" / "records.md").read_text().partition("\n## Alerts\n")[2].partition("\n## ")[0]
  named = set(re.findall(r"\btrainer_\w+", alerts))
  assert named == served | {exporter._AGE[0]}
