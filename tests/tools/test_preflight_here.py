"""The preflight command for the machine that it runs on. It compiles for a CPU, so one Python is enough for it."""

from __future__ import annotations

import re

import pytest
from tests.tools.preflight_command import AUTO, TINY, compile_once

from stepcost.chips import Chip
from trainer.preflight import cpu_peaks
from trainer.tools.preflight import main


@pytest.mark.soak  # test_preflight.py has the parts of the report, for chips that this machine does not have
def test_for_this_machine(server, tmp_path):
  keys = "num_slices=2 steps=10 attention=dot_product base_num_decoder_layers=1 opt_type=sgd dtype=float32".split()
  keys.append("remat_policy=none")
  printed = tmp_path / "printed.txt"
  code = server.run("trainer.tools.preflight", [*TINY, *keys], {}, printed).wait(500)
  out = printed.read_text()
  assert code == 0, out
  assert "1 of 2 |" in out
  assert "The step on 2 of 2 slices" in out and "The step on 1 of 2 slices" in out
  assert "Ramdisk per host" in out
  assert "Measured per device of this machine: matmuls" in out
  assert out.count("Roofline on this CPU: compute") == 2 and out.count(": fits") == 2
  assert out.count("Step time on this CPU: ") == 2
  assert out.count("Missing in these times: DCN: the bandwidth is unknown") == 1  # one slice sends nothing


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
