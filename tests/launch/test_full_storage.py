"""Storage that fails under `trainer.launch.local`: no member is lost, and training goes on until there is space."""

from __future__ import annotations

import subprocess

import pytest
from tests.support.process_runs import ProcessRun

KEEPS_ALL = ("checkpoint_period=5", "checkpoint_keep_period=1")


@pytest.fixture
def fill(tmp_path):
  """fill() mounts a small file system for the checkpoints of the run; returns a function that enlarges it."""
  path = tmp_path / "out" / "run" / "checkpoints"

  def mount():
    path.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if result.returncode != 0:
      pytest.skip(f"mounting a small tmpfs is not permitted here: {result.stderr.strip()}")
    return lambda: subprocess.run(["mount", "-o", "remount,size=50m", str(path)], timeout=30, check=True)

  yield mount
  subprocess.run(["umount", "-l", str(path)], timeout=30, check=False)


@pytest.mark.soak
def test_the_last_state_goes_to_local_copies(compiled, server, tmp_path, fill):
  """A full disk at the last save ends the run at once, for every member, and the same command restores its state. The
  copies of one slice are enough for all."""
  grow = fill()
  copies = ["enable_emergency_checkpoint=true", f"local_checkpoint_directory={tmp_path / 'ram'}"]
  keys = [compiled, "steps=53", *KEEPS_ALL, *copies, "local_checkpoint_period=50"]
  run = ProcessRun(tmp_path, keys, slices=2, server=server)
  with run.launched() as supervisor:
    assert run.wait(supervisor) == 1, run.tail()
  assert run.printed.count("SaveFailed: step 53 could not be saved") == 1, run.tail()
  assert "ERROR:" not in run.printed and "Starting member" not in run.printed
  grow()
  kept = next(run.ram.rglob("53.s*.json")).name.split(".")[1]  # the slice whose copy has the last state
  others = [path for path in run.ram.rglob("*.s*.*") if path.name.split(".")[1] != kept]
  assert others
  for path in others:
    path.unlink()
  with run.launched() as supervisor:
    assert run.wait(supervisor) == 0, run.tail()
  assert [(event["step"], event["tier"]) for event in run.events("restore")][-1] == (53, "emergency")
  assert run.steps() == list(range(1, 54)) and run.committed_steps()[-1] == 53
