"""Folders and files whose names look like the syntax of the commands: the disk is asked first."""

from __future__ import annotations

import json

import pytest
from tests.support import chats, hf_folders

from input_pipeline import data_files, datasets
from input_pipeline.options import DataOptions
from trainer.checkpoint import run_folder
from trainer.config.errors import ConfigError
from trainer.config.load import load
from trainer.config.schema import Config
from trainer.weights import sources, stored_arrays
from trainer.weights.model import Model


@pytest.fixture
def run(tmp_path):
  """A run with a checkpoint of step 5, whose name ends like that of a step."""
  cfg = hf_folders.model("qwen3", vocab_size=258)
  hf_folders.write_run(tmp_path / "x@6", Config(model=cfg), hf_folders.random_params(cfg))
  return str(tmp_path / "x@6")


def test_a_run_may_have_the_name_of_a_step(run, tmp_path):
  assert run_folder.split(run) == (run, "") and run_folder.split(f"{run}@5") == (run, "5")
  for place in (run, f"{run}@5", f"{run}/"):
    assert sources.open_source(place).directory.rstrip("/") == run
    assert stored_arrays.entries(place)
    assert Model.from_run(place).longest
  assert run_folder.split(f"{tmp_path}/y@6") == (f"{tmp_path}/y", "6")
  with pytest.raises(ConfigError, match=r"'six' is not the number of a step"):
    run_folder.split(f"{run}@six")
  with pytest.raises(ConfigError, match=f"Give {run}@5."):
    sources.open_source(f"{run}/checkpoints/5/")


def test_the_tokenizer_of_a_model_in_a_folder_with_the_name_of_a_step(tmp_path):
  chats.write_tokenizer(tmp_path / "model@2", chats.CHATML)
  config = load(["configs/base.yml", f"load_parameters_path={tmp_path}/model@2", "vocab_size=300"])
  assert config.data.tokenizer_path == f"{tmp_path}/model@2/tokenizer.json"


@pytest.mark.parametrize("name", ["data:2024", "data,20240301", "data: 1.5", "a;b", "one; two.jsonl"])
def test_files_and_folders_may_end_like_weights_and_lists(tmp_path, name):
  folder = tmp_path / name
  if name.endswith(".jsonl"):
    folder.write_text('{"text": "a"}\n')
    wanted = [folder]
  else:
    folder.mkdir()
    wanted = [folder / "a.jsonl", folder / "b.jsonl"]
    for file in wanted:
      file.write_text(json.dumps({"text": file.name}) + "\n")
  found = data_files.find("grain_train_files", str(folder), "jsonl")
  assert [one.file for one in found] == wanted
  cfg = DataOptions(dataset_type="grain", grain_file_type="jsonl", grain_train_files=str(folder))
  assert datasets.find(cfg)["train"].size


def test_a_config_file_may_be_in_a_folder_with_an_equals_sign(tmp_path):
  (tmp_path / "lr=3").mkdir()
  (tmp_path / "lr=3" / "config.yml").write_text("steps: 7\n")
  assert load([f"{tmp_path}/lr=3/config.yml"]).run.steps == 7
