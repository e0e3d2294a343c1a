"""The quickstart with a smaller model and less text: its output and files, and bit-identical runs with one seed."""

from __future__ import annotations

import email
import json
import math
import os
import pathlib
import re
import subprocess
import sys

import pytest
from tests.support import needs
from tests.support.command import without_times
from tests.support.report_page import Page

import trainer

CONFIG = pathlib.Path(__file__).parents[1] / "configs" / "quickstart.yml"
SHRUNK = (
  "base_emb_dim=64 base_num_decoder_layers=2 base_num_query_heads=2 base_num_kv_heads=1 head_dim=32 base_mlp_dim=128 "
  "per_device_batch_size=4 max_target_length=64 steps=6 eval_interval=3 eval_steps=2 checkpoint_period=3 "
).split()


def command_line(folder: pathlib.Path, name: str) -> list[str]:
  """The arguments of the small quickstart. Each run trains its own tokenizer; all share compiled programs, as a user's
  runs do."""
  paths = [f"base_output_directory={folder}", f"run_name={name}", f"dataset_cache_directory={folder}/cache_{name}"]
  paths.append(f"jax_cache_dir={folder}/compiled")
  paths.append(f"dataset_path={pathlib.Path(email.__file__).parent}")  # half a megabyte of the standard library
  return [str(CONFIG), *SHRUNK, *paths]


pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
  return tmp_path_factory.mktemp("quickstart")


@pytest.fixture(scope="module")
def run(folder) -> tuple[pathlib.Path, str]:
  """The small quickstart as a user starts it: its run directory and what it printed."""
  environment = os.environ | {"PYTHONPATH": str(pathlib.Path(trainer.__file__).parents[1]), "JAX_PLATFORMS": "cpu"}
  environment.pop("XLA_FLAGS", None)  # compile as for a user
  command = [sys.executable, "-m", "trainer", *command_line(folder, "one")]
  done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500)
  assert done.returncode == 0, done.stdout + done.stderr
  return folder / "one", done.stdout


def records(directory: pathlib.Path) -> list[dict]:
  return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_it_learns_from_ln_v(run):
  directory, out = run
  losses = [float(loss) for loss in re.findall(r"completed step: \d+, .*? loss: ([\d.]+)", out)]
  assert len(losses) == 6
  assert losses[0] == pytest.approx(math.log(4096), abs=0.1)
  assert losses[-1] < losses[0] - 0.1  # at the quickstart's learning rate six steps give 0.12
  baselines = re.search(
    r"Losses to beat: ([\d.]+) for a uniform guess .*, ([\d.]+) for .* \(([\d.]+) in evaluation\)", out
  )
  assert baselines
  assert float(baselines[1]) == pytest.approx(math.log(4096), abs=0.01)
  assert float(baselines[2]) < float(baselines[1])
  assert re.search(
    r"Data: .*email, bpe tokenizer with \d,\d{3} ids, [\d,]+ tokens for training in .* examples .*; .* epochs\n", out
  )
  assert [int(step) for step in re.findall(r"eval at step (\d+): loss", out)] == [3, 6]
  assert {path.name for path in (directory / "checkpoints").iterdir()} == {"3", "6"}


@needs.workshop
def test_it_writes_a_sample_a_report_and_next_commands(run):
  directory, out = run
  losses = [float(loss) for loss in re.findall(r"completed step: \d+, .*? loss: ([\d.]+)", out)]
  assert re.search(r"sample after step 6 ---\n\S+ ", without_times(out))
  last = [without_times(text).splitlines()[-1] for text in ((directory / "log.txt").read_text(), out)]
  assert last[0] == last[1] and last[0].endswith(f"-m trainer.tools.export_hf {directory} {directory}-hf")
  assert (directory / "loss.png").read_bytes().startswith(b"\x89PNG")
  page = Page((directory / "report.html").read_text())
  assert all(load.startswith("data:image/svg+xml") for load in page.loads) and len(page.loads) == 3
  assert "6 steps, 0 s lost, 0 tokens lost" in page.text and "training loss, last step" in page.tiles
  assert f"training from {losses[0]:.4g} at step 1 to {losses[-1]:.4g} at step 6" in page.alts[0]
  assert page.cells[page.cells.index("Data set") + 1].endswith("email")
  assert list((directory / "tensorboard").glob("events.out.tfevents.*"))


def test_step_time_excludes_evaluation_time(run):
  """Step 4 follows the first evaluation, whose compilation takes much longer than a step."""
  by_step = {(record["step"], "eval_loss" in record): record for record in records(run[0])}
  assert by_step[4, False]["seconds"] < by_step[3, True]["eval_seconds"]
