"""trainer.tools.evaluate gives the losses that the run itself has recorded."""

from __future__ import annotations

import json
import math
import re

import pytest
from tests.support.command import Run, wait_for_exit
from tests.support.command_runs import write_text
from tests.support.hf_folders import RUN_KEYS


@pytest.mark.slow
def test_a_checkpoint_has_the_loss_that_training_recorded(server, compiled, tmp_path):
  keys = [*RUN_KEYS, *write_text(tmp_path), compiled, "steps=4", "checkpoint_period=2", "eval_interval=2"]
  run = Run(tmp_path / "a", [*keys, "eval_steps=3"], server.start)
  assert run.start().wait(240) == 0, run.printed[-4000:]
  lines = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
  recorded = {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}
  assert len(set(recorded.values())) == 2
  printed = tmp_path / "printed.txt"

  def evaluate(*arguments: str) -> int:
    printed.write_text("")
    return wait_for_exit(server.run("trainer.tools.evaluate", arguments, {}, printed), 240)

  for step, loss in recorded.items():
    assert evaluate(f"{run.directory}@{step}") == 0, printed.read_text()
    found = re.search(r"loss ([\d.]+) nats per token, perplexity ([\d.]+), over (\d+) tokens", printed.read_text())
    assert found[1] == f"{loss:.6f}" and found[2] == f"{math.exp(loss):.4f}"
  assert evaluate(f"{run.directory}@2", "vocab_size=300") == 2
  assert "vocab_size=300, there 258" in printed.read_text()
