"""The real command on a mixture of TFDS, Parquet, JSONL and text: killed, resumed, and changed."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import pytest
from tests.support import tfds_dataset
from tests.support.command import Run
from tests.support.command_runs import KEYS, start_and_train

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


@pytest.mark.soak  # test_mixture.py does this without a whole run
def test_a_mixture_is_killed_resumed_and_changed(tmp_path, server, compiled):
  sources = write_sources(tmp_path)
  path = tmp_path / "mixture.yml"

  def weigh(**weights: int) -> None:
    path.write_text(json.dumps({name: sources[name] | {"weight": weight} for name, weight in weights.items()}))

  keys = [*KEYS, "dataset_type=grain", f"grain_train_mixture_config_path={path}", "vocab_size=258", "packing=best_fit"]
  keys += [f"dataset_cache_directory={tmp_path}/cache", compiled, "max_target_length=64"]
  weigh(tfds=4, parquet=3, jsonl=1)

  undisturbed = Run(tmp_path / "undisturbed", keys, server.start)
  assert undisturbed.finish(f"steps={STEPS}") == 0, undisturbed.printed
  run = Run(tmp_path / "killed", keys, server.start)
  process = start_and_train(run, 8, "steps=1000000")
  process.send_signal(signal.SIGKILL)
  assert process.wait(60) == -signal.SIGKILL
  killed_after = run.last_step
  assert run.finish(f"steps={max(STEPS, killed_after)}") == 0, run.printed
  (restored,) = [event["step"] for event in run.events("restore") if event["step"]]
  assert restored > 0
  assert f"Data: example {2 * restored} is next. The data and the content of the next examples match" in run.printed
  ours, theirs = run.losses(), undisturbed.losses()
  assert {step: ours[step] for step in theirs} == theirs
  examples = {record["step"]: record["examples"] for record in run.records("metrics") if "loss" in record}
  assert examples[STEPS] == {"tfds": 24, "parquet": 18, "jsonl": 6}

  weigh(tfds=2, text=1, parquet=1)
  more = f"steps={(last := run.last_step) + 4}"
  assert run.finish(more) == 2
  assert "allow_config_change=data" in run.printed
  assert run.finish(more, "allow_config_change=data") == 0, run.printed
  before = examples[last]
  for line in (
    f"The mixture changes at example {2 * last}.",
    f"Mixture: tfds continues at its example {before['tfds']}",
    "Mixture: text is new",
    f"Mixture: jsonl is removed after {before['jsonl']} examples",
  ):
    assert line in run.printed
  assert run.records("metrics")[-1]["examples"] == {
    "tfds": before["tfds"] + 4,
    "text": 2,
    "parquet": before["parquet"] + 2,
  }
  # The next start is an ordinary resume.
  assert run.finish(f"steps={last + 6}") == 0, run.printed
  assert run.records("metrics")[-1]["examples"]["tfds"] == before["tfds"] + 6


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
