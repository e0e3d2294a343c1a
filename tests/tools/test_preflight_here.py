"""The preflight command for the machine that it runs on. It compiles for a CPU, so one Python is enough for it."""

from __future__ import annotations

import re

import pytest
from tests.tools.preflight_command import AUTO, TINY, command, compile_once

from stepcost.chips import Chip
from trainer.preflight import cpu_peaks
from trainer.tools.preflight import main


@pytest.mark.slow
def test_for_this_machine():
  done = command("num_slices=3", "steps=10", "attention=dot_product", "base_num_decoder_layers=1", "opt_type=sgd")
  assert done.returncode == 0, done.stderr
  assert "2 of 3 |                      2 |   25.0% |   50.0%" in done.stdout
  assert "The step on 3 of 3 slices" in done.stdout and "The step on 2 of 3 slices" in done.stdout
  assert "Ramdisk per host" in done.stdout
  assert "Measured per device of this machine: matmuls" in done.stdout
  assert done.stdout.count("Roofline on this CPU: compute") == 2 and done.stdout.count(": fits") == 2
  assert done.stdout.count("Step time on this CPU: ") == 2
  assert done.stdout.count("Missing in these times: DCN: the bandwidth is unknown") == 2


@pytest.mark.soak  # of a key that leaves one program out
def test_the_step_with_one_slice_lost_can_be_skipped(monkeypatch, capsys):
  """In this process, and the rates of the machine are given."""
  monkeypatch.setattr(cpu_peaks, "measure", lambda *_: Chip("this CPU", (), 1e9, 1 << 40, 1e9, 1e9))
  compile_once(monkeypatch)
  keys = "num_slices=4 steps=10 attention=dot_product dtype=float32 opt_type=sgd preflight.degraded=none"
  assert main([*TINY, *keys.split(), *AUTO]) == 0
  out = capsys.readouterr().out
  assert "remat_policy=auto: minimal_with_context, the first policy that fits, in the order for cpus" in out
  assert re.search(r"\n  minimal_with_context \| no estimate \| no estimate \| [\d.]+ MB\n", out), out
  assert "The step on 4 of 4 slices" in out and "The step on 3 of 4 slices" not in out
  assert "3 of 4 |" in out, out
