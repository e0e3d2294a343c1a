"""Storage that fails under `trainer.launch.local`: no member is lost, and training goes on until there is space."""

from __future__ import annotations

import signal
import subprocess

import pytest
from tests.support.forked_runs import ENDLESS
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


@pytest.mark.soak  # the next tests fill the disk, too
@pytest.mark.parametrize("lanes", [1, 2])
def test_a_full_disk_costs_no_member_and_no_step(compiled, server, tmp_path, fill, lanes):
  grow = fill()
  keys = [compiled, ENDLESS, *KEEPS_ALL, f"devices_per_slice={lanes}"]
  run = ProcessRun(tmp_path, keys, slices=2, options=["--processes-per-slice", str(lanes)], server=server)
  with run.launched() as supervisor:
    run.wait_for(lambda: run.count("checkpoint_failed") >= 2, supervisor, 240)  # four processes compile first
    assert "Starting member" not in run.printed and run.printed.count("could not be saved") >= 2, run.tail()
    saved = run.committed_steps()
    grow()
    run.wait_for(lambda: run.committed_steps()[-1] > saved[-1] + 10, supervisor)
    supervisor.send_signal(signal.SIGTERM)
    assert run.wait(supervisor, 60) == 42, run.tail()
  assert run.steps() == list(range(1, run.last_step + 1))
  assert run.count("primary") == 0 and run.committed_steps()[-1] == run.last_step


@pytest.mark.soak  # test_local.py changes the primary, the other test fills the storage
def test_the_next_primary_goes_on_too(compiled, server, tmp_path, fill):
  """It makes up the save that failed at once, and fails as well."""
  fill()
  run = ProcessRun(tmp_path, [compiled, ENDLESS, *KEEPS_ALL], slices=2, server=server)
  with run.launched() as supervisor:
    run.wait_for(lambda: run.count("checkpoint_failed") >= 2, supervisor)
    assert run.kill(run.first_primary)
    failed = run.count("checkpoint_failed")
    run.wait_for(lambda: run.count("primary") == 1 and run.count("checkpoint_failed") >= failed + 2, supervisor)
    run.wait_for(lambda: len(run.active()) == 2, supervisor)  # the lost member gets the state of the other one
  assert run.printed.count("Starting member") == 1
  assert run.steps() == list(range(1, run.last_step + 1))


@pytest.mark.slow
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
