"""trainer.tools.evaluate gives the losses that the run itself has recorded."""

from __future__ import annotations

import json
import math
import re
from types import SimpleNamespace

import pytest
from tests.support.command import Run, wait_for_exit
from tests.support.command_runs import write_text
from tests.support.hf_folders import RUN_KEYS

import trainer
from trainer.tools import evaluate


@pytest.mark.slow
def test_a_checkpoint_has_the_loss_that_training_recorded(server, compiled, tmp_path, capsys):
  keys = [*RUN_KEYS, *write_text(tmp_path), compiled, "steps=4", "checkpoint_period=2", "eval_interval=2"]
  keys += ["opt_type=sgd", "learning_rate=1"]  # test_load_parameters.py trains with the same program
  run = Run(tmp_path / "a", [*keys, "eval_steps=3"], server.start)
  assert run.start().wait(240) == 0, run.printed[-4000:]
  lines = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
  recorded = {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}
  assert len(set(recorded.values())) == 2
  printed = tmp_path / "printed.txt"
  place = f"{run.directory}@2"  # not the newest
  assert wait_for_exit(server.run("trainer.tools.evaluate", [place], {}, printed), 240) == 0, printed.read_text()
  found = re.search(r"loss ([\d.]+) nats per token, perplexity ([\d.]+), over (\d+) tokens", printed.read_text())
  assert found[1] == f"{recorded[2]:.6f}" and found[2] == f"{math.exp(recorded[2]):.4f}"
  assert evaluate.main([place, "vocab_size=300"]) == 2
  assert "vocab_size=300, there 258" in capsys.readouterr().err


def test_a_loss_whose_perplexity_is_no_float_is_printed(monkeypatch, tmp_path, capsys):
  monkeypatch.setattr(trainer, "load", lambda *keys: SimpleNamespace(observe=SimpleNamespace(eval_steps=1)))
  monkeypatch.setattr(trainer, "Run", lambda config: SimpleNamespace(evaluate=lambda place: {"eval": (710.0, 8.0)}))
  assert evaluate.main([str(tmp_path)]) == 0
  assert capsys.readouterr().out == "eval: loss 710.000000 nats per token, perplexity inf, over 8 tokens\n"
