"""Several named evaluation sets: their losses, the early end of a run, and mistakes in their file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.command import Run
from tests.support.command_runs import KEYS

pytestmark = pytest.mark.timeout(600)
STEPS = 12


def write_data(folder: Path) -> dict[str, Path]:
  """Writes documents to train on and for two sets."""
  files = {}
  for name, words in (("train", "one two three"), ("near", "three two one"), ("far", "@#! 987 %%%")):
    files[name] = folder / f"{name}.jsonl"
    lines = [json.dumps({"text": f"{words} {number % 7}"}) for number in range(300 if name == "train" else 20)]
    files[name].write_text("\n".join(lines))
  (folder / "far.txt").write_text("\n".join(json.loads(line)["text"] for line in files["far"].read_text().splitlines()))
  sets = {
    "near": {"path": str(files["near"]), "grain_file_type": "jsonl"},
    "far": {"dataset_type": "text", "dataset_path": f"{folder}/far.txt"},
  }
  (folder / "sets.json").write_text(json.dumps(sets))
  return files


def keys_of(folder: Path, compiled: str = "") -> list[str]:
  keys = "dataset_type=grain grain_file_type=jsonl vocab_size=258 learning_rate=0.5 packing=split eval_interval=2"
  places = f"grain_train_files={folder}/train.jsonl dataset_cache_directory={folder}/cache"
  return [*KEYS, *keys.split(), *places.split(), *compiled.split(), f"steps={STEPS}", "eval_steps=2"]


def evaluations(run: Run) -> list[dict]:
  return [record for record in run.records("metrics") if "eval_loss" in record]


@pytest.fixture(scope="module")
def both(tmp_path_factory, server, compiled) -> tuple[Path, Run]:
  """(folder of the data, a run that evaluates both sets)."""
  folder = tmp_path_factory.mktemp("sets")
  write_data(folder)
  run = Run(folder / "both", [*keys_of(folder, compiled), f"eval_sets={folder}/sets.json"], server.start)
  assert run.finish() == 0, run.printed
  return folder, run


def test_the_losses_of_named_sets_are_those_of_the_sets_alone(both, server, compiled):
  folder, run = both
  found = evaluations(run)
  assert [record["step"] for record in found] == list(range(2, STEPS + 1, 2))
  alone = Run(folder / "alone", [*keys_of(folder, compiled), f"grain_eval_files={folder}/near.jsonl"], server.start)
  assert alone.finish() == 0, alone.printed
  assert [record["eval_losses"]["near"] for record in found] == [record["eval_loss"] for record in evaluations(alone)]
  assert all(set(record["eval_losses"]) == {"near", "far"} for record in found)
  assert [record["eval_loss"] for record in found] == [record["eval_losses"]["near"] for record in found]
  assert "eval_losses" not in evaluations(alone)[0]
  assert "eval of far at step 2: loss" in run.printed and "Evaluation set far: " in run.printed
  assert [event["what"] for event in run.events("compile")] == ["slices [0]", "evaluation on slices [0]"]
  assert found[-1]["eval_losses"]["far"] > found[-1]["eval_losses"]["near"] + 0.1


def test_a_run_is_complete_at_its_target_and_stays_so(both, server, compiled):
  folder, run = both
  losses = {record["step"]: record["eval_losses"]["far"] for record in evaluations(run)}
  target = losses[6]
  assert all(losses[step] > target for step in (2, 4)), losses
  sets = json.loads((folder / "sets.json").read_text())
  (folder / "far_first.json").write_text(json.dumps(dict(reversed(sets.items()))))
  keys = [*keys_of(folder, compiled), f"eval_sets={folder}/far_first.json", "checkpoint_period=5"]
  early = Run(folder / "early", keys, server.start)
  wanted = f"target_eval_loss={target!r}"
  assert early.finish(wanted) == 0, early.printed
  assert "at step 6 reaches target_eval_loss=" in early.printed
  assert early.last_step == 6 and early.committed_steps() == [5, 6]
  assert {record["step"]: record["eval_loss"] for record in evaluations(early)} == {
    step: losses[step] for step in (2, 4, 6)
  }
  before = early.records("metrics")
  assert early.finish(wanted) == 0, early.printed
  assert early.records("metrics") == before and early.committed_steps() == [5, 6]
  assert early.finish() == 0, early.printed  # without the target, the run goes on
  assert early.losses() == run.losses()
