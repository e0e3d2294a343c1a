"""Some kills of end_to_end/kill_and_resume.py, on the real command."""

from __future__ import annotations

import random
import re
import shutil
import signal

import numpy as np
import pytest
from end_to_end import kill_and_resume
from tests.support import command

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore:Sharding info not provided")]
STEPS = 30


@pytest.fixture(scope="module")
def undisturbed(start, tmp_path_factory):
  run = kill_and_resume.make_run(tmp_path_factory.mktemp("kills"), "undisturbed", start, STEPS)
  assert run.finish() == 0, run.printed
  return run


@pytest.mark.soak  # test_kill.py kills at random moments, too
def test_killed_again_and_again(start, undisturbed):
  run = kill_and_resume.make_run(undisturbed.folder.parent, "killed", start, STEPS)
  hit = kill_and_resume.kill_then_finish(run, 3, random.Random(0), startup=4)
  assert hit.total() >= 2, hit
  assert command.differences(run, undisturbed, STEPS) == []


@pytest.mark.soak  # test_kill.py kills at random moments, test_tiers.py restores local copies
def test_a_run_that_was_killed_before_its_last_commit_saves_its_last_step(start, tmp_path):
  """The local copy of the last step is complete, so nothing is left to train, and nothing may touch this copy."""
  run = kill_and_resume.make_run(tmp_path, "killed", start, 4)
  assert run.finish() == 0, run.printed
  last, folder = run.arrays(4), run.directory / "checkpoints" / "4"
  local = lambda: {path: path.stat().st_mtime_ns for path in run.ram.rglob("4.*")}
  before = local()
  assert before

  shutil.rmtree(folder)
  assert run.finish("fault_injection=ckpt_kill@4") == -signal.SIGKILL
  assert 4 not in run.committed_steps()
  assert run.finish() == 0, run.printed
  assert "All 4 steps are done already" in run.printed
  assert run.events("checkpoint_restored")[-1]["tier"] == "emergency"
  np.testing.assert_equal(run.arrays(4), last)

  damaged = max((folder / "state").rglob("d/*"), key=lambda path: path.stat().st_size)
  damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
  assert run.finish() == 0, run.printed
  assert run.events("checkpoint_rejected")[-1]["tier"] == "persistent"
  np.testing.assert_equal(run.arrays(4), last)

  saves = run.events("checkpoint_saved")
  assert run.finish() == 0, run.printed
  assert run.events("checkpoint_saved") == saves and local() == before


@pytest.mark.soak  # of the check of end_to_end/kill_and_resume.py
def test_the_check_reports_a_broken_run(undisturbed, tmp_path):
  shutil.copytree(undisturbed.folder, tmp_path / "other")
  other = command.Run(tmp_path / "other", [])
  assert command.differences(other, undisturbed, STEPS) == []
  metrics = other.directory / "metrics.jsonl"
  metrics.write_text(re.sub(r'("step": 7, .*"loss": [0-9]+\.)', r"\g<1>0", metrics.read_text()))
  other.arrays = lambda step: undisturbed.arrays(step) | {"step": np.int32(STEPS + 1)}
  assert [line[:11] for line in command.differences(other, undisturbed, STEPS)] == ["step 7 has ", "step differ"]
  first = metrics.read_text().splitlines()[0]
  metrics.write_text(f'{metrics.read_text()}{first.replace("grad_norm", "was")[:-1]}, "grad_norm": 0.0}}\n')
  with pytest.raises(AssertionError, match="when it was repeated"):
    other.losses()
