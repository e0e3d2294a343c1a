"""docs/notebook.ipynb: its cells run in order, in an empty folder. It is stored without outputs."""

from __future__ import annotations

import json
import pathlib

import pytest
from tests.test_library import SMALL

NOTEBOOK = pathlib.Path(__file__).parents[2] / "docs" / "notebook.ipynb"


def test_it_has_ten_cells_without_outputs():
  notebook = json.loads(NOTEBOOK.read_text())
  assert (notebook["nbformat"], notebook["nbformat_minor"], len(notebook["cells"])) == (4, 5, 10)
  told = "".join(notebook["cells"][0]["source"])
  assert "jupyterlab" in told and "jupyter lab docs/notebook.ipynb" in told
  assert "elastic-trainer-jax" not in told  # nobody has published it
  assert len({cell["id"] for cell in notebook["cells"]}) == 10
  for cell in notebook["cells"]:
    code = {"outputs": [], "execution_count": None} if cell["cell_type"] == "code" else {}
    assert cell == {name: cell[name] for name in ("cell_type", "id", "source")} | {"metadata": {}} | code


@pytest.mark.soak
def test_its_cells_run(server, tmp_path):
  (tmp_path / "text").mkdir()
  for i in range(4):
    (tmp_path / "text" / f"{i}.txt").write_text(f"{i} lines of text are enough for a few steps.\n" * 40)
  keys = SMALL | {"dataset_path": f"{tmp_path}/text", "dataset_cache_directory": f"{tmp_path}/cache"}
  keys |= {"jax_cache_dir": "", "eval_steps": 2}
  changes = [f"steps=100=>steps=10, **{keys}", "steps=12=>steps=8", "tokens=48=>tokens=4"]
  log = tmp_path / "printed.txt"
  process = server.run("tests.pages.notebook_run", [str(NOTEBOOK), str(tmp_path), *changes], {"MPLBACKEND": "Agg"}, log)
  assert process.wait(200) == 0, log.read_text()
  printed = log.read_text()
  assert "2 of 2 devices: cpu" in printed and "{'eval': (" in printed and "model.safetensors" in printed
  metrics = (tmp_path / "runs" / "lost" / "metrics.jsonl").read_text().splitlines()
  slices = {record["step"]: record["slices"] for record in map(json.loads, metrics) if "loss" in record}
  assert slices[5] == 2 and slices[8] == 1, slices
