"""trainer.tools.evaluate gives the losses that the run itself has recorded."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys

from tests.support.command import Run, cpu_environment
from tests.support.command_runs import write_text


def test_a_checkpoint_has_the_loss_that_training_recorded(server, compiled, tmp_path):
  keys = [*write_text(tmp_path), compiled, "vocab_size=258", "steps=4", "checkpoint_period=2", "eval_interval=2"]
  run = Run(tmp_path / "a", [*keys, "eval_steps=3"], server.start)
  assert run.start().wait(240) == 0, run.printed[-4000:]
  lines = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
  recorded = {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}
  assert len(set(recorded.values())) == 2
  for step, loss in recorded.items():
    command = [sys.executable, "-m", "trainer.tools.evaluate", f"{run.directory}@{step}"]
    done = subprocess.run(command, env=cpu_environment({}), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = re.search(r"loss ([\d.]+) nats per token, perplexity ([\d.]+), over (\d+) tokens", done.stdout)
    assert found[1] == f"{loss:.6f}" and found[2] == f"{math.exp(loss):.4f}"
  wrong = subprocess.run([*command, "vocab_size=300"], env=cpu_environment({}), capture_output=True, text=True)
  assert wrong.returncode == 2 and "vocab_size=300, there 258" in wrong.stderr
