"""The real command on a mixture."""

from __future__ import annotations

import json

import pytest
from tests.support.command import Run
from tests.support.command_runs import KEYS

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore:Sharding info not provided")]


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
