"""The preflight command for the machine that it runs on. It compiles for a CPU, so one Python is enough for it."""

from __future__ import annotations

import re

import pytest
from tests.preflight.preflight_command import AUTO, TINY, compile_once

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
  assert out.count("Communication per device and step") == 1  # one slice sends nothing


@pytest.mark.soak  # of a key that leaves one program out
def test_the_step_with_one_slice_lost_can_be_skipped(monkeypatch, capsys):
  compile_once(monkeypatch)
  keys = "num_slices=4 steps=10 attention=dot_product dtype=float32 opt_type=sgd preflight.degraded=none"
  assert main([*TINY, *keys.split(), *AUTO]) == 0
  out = capsys.readouterr().out
  assert "remat_policy=auto: minimal_with_context, the first policy that fits, in the order for cpus" in out
  assert re.search(r"\n  minimal_with_context \| no estimate \| no estimate \| [\d.]+ MB\n", out), out
  assert "The step on 4 of 4 slices" in out and "The step on 3 of 4 slices" not in out
  assert "3 of 4 |" in out, out
