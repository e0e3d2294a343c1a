"""The real command on a mixture of TFDS, Parquet, JSONL and text: killed, resumed, and changed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tests.support import tfds_dataset
from tests.support.command import Run
from tests.support.command_runs import KEYS

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore:Sharding info not provided")]
STEPS = 24
ARROW = "pyarrow is not installed: it belongs to the extra arrow, which setup.sh --dev installs"


def write_sources(folder: Path) -> dict[str, dict[str, object]]:
  """Writes four datasets, and returns the content of a mixture's file without the weights."""
  arrow = pytest.importorskip("pyarrow", reason=ARROW)
  parquet = pytest.importorskip("pyarrow.parquet", reason=ARROW)
  texts = {
    name: [f"{name} has the document {number} of many" for number in range(200)]
    for name in ("tfds", "parquet", "jsonl", "text")
  }
  dataset = tfds_dataset.prepare(folder / "tfds", texts["tfds"], [np.arange(3)] * 200)
  parquet.write_table(arrow.table({"text": texts["parquet"]}), folder / "a.parquet")
  (folder / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts["jsonl"]))
  (folder / "a.txt").write_text("\n".join(texts["text"]))
  return {
    "tfds": {"dataset_type": "tfds", "dataset_path": str(dataset), "train_data_columns": "body"},
    "parquet": {"path": f"{folder}/*.parquet", "grain_file_type": "parquet"},
    "jsonl": {"path": f"{folder}/a.jsonl", "grain_file_type": "jsonl", "epochs": 2},
    "text": {"dataset_type": "text", "dataset_path": f"{folder}/a.txt"},
  }


def test_limits_of_epochs_that_end_before_the_run_are_an_error(tmp_path, server, compiled):
  (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": [number] * 40}) for number in range(30)))
  source = {"path": f"{tmp_path}/a.jsonl", "grain_file_type": "jsonl", "weight": 1, "epochs": 1}
  (tmp_path / "mixture.yml").write_text(json.dumps({"a": source}))
  keys = [*KEYS, "dataset_type=grain", f"grain_train_mixture_config_path={tmp_path}/mixture.yml", "packing=none"]
  keys += [f"dataset_cache_directory={tmp_path}/cache", compiled, "steps=20"]
  run = Run(tmp_path / "run", keys, server.start)
  assert run.finish() == 2
  assert "steps=20: the sources of the mixture end after step 15" in run.printed
  assert run.last_step == 0
