"""Runs the code cells of a notebook in this process: NOTEBOOK FOLDER [OLD=>NEW ...], texts that are replaced."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

if __name__ == "__main__":
  notebook, folder, *changes = sys.argv[1:]
  cells = [cell for cell in json.loads(Path(notebook).read_text())["cells"] if cell["cell_type"] == "code"]
  os.chdir(folder)
  values: dict[str, object] = {"__name__": "__main__"}
  for number, cell in enumerate(cells):
    code = "".join(cell["source"])
    for change in changes:
      old, _, new = change.partition("=>")
      code = code.replace(old, new)
    exec(compile(code, f"code cell {number}", "exec"), values)
