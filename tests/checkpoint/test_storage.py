"""Storage that fails during a run: full, or read-only. The error is raised, and earlier checkpoints stay good."""

from __future__ import annotations

import subprocess

import jax
import numpy as np
import pytest
from tests.support import toy_state

from trainer.checkpoint.checkpoint_errors import SaveFailed

MIB = 1 << 20


@pytest.fixture
def disk(tmp_path):
  """disk(size) returns the folder of a new file system of `size` bytes; remount(option) changes it."""
  mounted = []

  def mount(size: int):
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if result.returncode != 0:
      pytest.skip(f"mounting a small tmpfs is not permitted here: {result.stderr.strip()}")
    mounted.append(path)
    return path

  yield mount
  for path in mounted:
    subprocess.run(["umount", "-l", str(path)], timeout=30, check=True)


def remount(path, option: str) -> None:
  subprocess.run(["mount", "-o", f"remount,{option}", str(path)], timeout=30, check=True)


def state(step: int):
  return toy_state.place(
    {"w": np.random.default_rng(step).standard_normal((512, 512)).astype(np.float32)}, toy_state.mesh(2, 4)
  )


def make(path, **changes):
  recorder = toy_state.Recorder()
  cfg = toy_state.config(checkpoint_period=1, **changes)
  return toy_state.backups(cfg, str(path / "run"), recorder=recorder), recorder.lines


def assert_restores(path, step, **changes):
  target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state(0))
  restored = make(path, **changes)[0].restore_newest(target)
  assert restored.step == step
  toy_state.assert_same_bits(restored.state, jax.tree.map(np.asarray, state(step)))


def warnings(lines: list[str]) -> list[str]:
  return [line for line in lines if not line.startswith("Saved checkpoint ")]


def save_until_it_fails(tiers, lines, first: int, last: int) -> int:
  """The first step at which the storage failed. That is one line, and the next save is tried."""
  for step in range(first, last + 1):
    before = len(warnings(lines))
    tiers.save(step, state(step), {})
    tiers.wait()
    if new := warnings(lines)[before:]:
      assert len(new) == 1 and f"step {step} could not be saved in" in new[0] and "Training goes on" in new[0]
      newest = f"The newest checkpoint in storage is of step {step - 1}, from 0:00:0"
      assert newest in new[0] or "The storage cannot tell which checkpoints it has" in new[0]
      return step
  raise AssertionError(f"no error up to step {last}")


@pytest.mark.parametrize("asynchronous", [True, False])
def test_persistent_disk_full(disk, asynchronous):
  path = disk(5 * MIB)  # space for four copies of 1 MiB, not for five
  options = {"async_checkpointing": asynchronous, "max_num_checkpoints_to_keep": 9}
  tiers, lines = make(path, **options)
  failed = save_until_it_fails(tiers, lines, 1, 6)
  assert failed in (4, 5)
  with pytest.raises(SaveFailed, match=f"step {failed + 1} could not be saved"):
    tiers.save(failed + 1, state(failed + 1), {}, last=True)
  remount(path, f"size={20 * MIB}")
  assert_restores(path, failed - 1)
  tiers.save(failed, state(failed), {})
  tiers.close()
  assert_restores(path, failed)


def test_persistent_becomes_read_only(disk):
  path = disk(20 * MIB)
  tiers, lines = make(path)
  tiers.save(1, state(1), {})
  tiers.wait()
  remount(path, "ro")
  assert save_until_it_fails(tiers, lines, 2, 2) == 2
  tiers.close()
  assert_restores(path, 1)


def emergency(path, run=None):
  """(tiers, their lines) with a ramdisk under `path` and the run's folder `run` (default: under `path` too)."""
  recorder = toy_state.Recorder()
  cfg = toy_state.config(
    enable_emergency_checkpoint=True,
    local_checkpoint_directory=str(path / "ram"),
    local_checkpoint_period=1,
    checkpoint_period=1000,
  )
  return toy_state.backups(cfg, str(run or path / "run"), recorder=recorder), recorder.lines


def test_ramdisk_full(disk):
  path = disk(int(1.5 * MIB))
  tiers, lines = emergency(path)
  assert save_until_it_fails(tiers, lines, 1, 3) == 2
  tiers.close()
  target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state(0))
  restored = emergency(path)[0].restore_newest(target)
  assert (restored.step, restored.tier) == (1, "emergency")


def test_a_last_state_that_storage_refuses_goes_to_the_ramdisk(disk, tmp_path):
  path = disk(20 * MIB)
  tiers, _ = emergency(tmp_path, run=path / "run")
  remount(path, "ro")
  with pytest.raises(SaveFailed):
    tiers.save(7, state(7), {}, last=True)
  remount(path, "rw")
  target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state(0))
  restored = emergency(tmp_path, run=path / "run")[0].restore_newest(target)
  assert (restored.step, restored.tier) == (7, "emergency")
