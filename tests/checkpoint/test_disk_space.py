"""The space that checkpoints need is compared with the free space before the first step."""

from __future__ import annotations

import errno
import fcntl
import shutil
from types import SimpleNamespace

import jax
import pytest
import tensorstore
from tests.support import toy_state

from trainer.checkpoint import disk_space
from trainer.checkpoint.arrays import state_tree
from trainer.config import ConfigError, load

STATE = toy_state.abstract(toy_state.values(), toy_state.mesh(1, 4))
SIZE = state_tree.state_bytes(STATE)
KEYS = ["configs/base.yml", "dataset_type=synthetic", "run_name=run", "checkpoint_period=10"]


def found(monkeypatch, tmp_path, free: int, *keys: str, total: int = 1 << 40, in_storage: bool = True) -> list[str]:
  monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=total, free=free))
  config = load([*KEYS, f"base_output_directory={tmp_path}", *keys])
  copied = {0: jax.devices()[:4], 1: jax.devices()[:4]}
  return list(disk_space.warnings(config, STATE, in_storage=in_storage, copied=copied))


@pytest.mark.parametrize(
  ("keys", "count"),
  [
    (["steps=1000"], 4),  # 3 are kept, and a new one is written before the oldest is deleted
    (["steps=15"], 2),  # step 10 and the last one
    (["steps=1000", "checkpoint_keep_period=50"], 24),
    (["steps=1000", "checkpoint_keep_period=15"], 37),  # multiples of 30
    (["steps=1000", "checkpoint_keep_best=2", "max_num_checkpoints_to_keep=1", "eval_interval=10", "eval_steps=1"], 4),
  ],
)
def test_the_checkpoints_that_are_kept(monkeypatch, tmp_path, keys, count):
  assert found(monkeypatch, tmp_path, count * SIZE, *keys) == []
  (warning,) = found(monkeypatch, tmp_path, count * SIZE - 1, *keys)
  assert f"({count} x {SIZE / 1e9:.3g} GB)" in warning and f"{(count * SIZE - 1) / 1e9:.3g} GB are there" in warning
  assert found(monkeypatch, tmp_path, 0, *keys, "enable_checkpointing=false") == []
  assert found(monkeypatch, tmp_path, 0, *keys, in_storage=False) == []
  assert found(monkeypatch, tmp_path, 0, *keys, total=0) == []  # a file system that does not tell
  checkpoints = tmp_path / "run" / "checkpoints" / "10"
  checkpoints.mkdir(parents=True)
  (checkpoints / "a").write_bytes(bytes(SIZE))  # a resume: one is there already
  (checkpoints / "b").symlink_to("gone")
  assert found(monkeypatch, tmp_path, (count - 1) * SIZE, *keys) == []


def test_local_copies_of_the_slices_of_this_process(monkeypatch, tmp_path):
  keys = ["steps=1000", "enable_emergency_checkpoint=true", "local_checkpoint_period=1"]
  keys += [f"local_checkpoint_directory={tmp_path / 'ram'}"]
  (warning,) = found(monkeypatch, tmp_path, 4 * SIZE - 1, *keys, in_storage=False)  # 2 slices x 2 copies
  assert str(tmp_path / "ram") in warning and "local copies" in warning
  assert found(monkeypatch, tmp_path, 5 * SIZE, *keys, in_storage=False) == []  # arrays are aligned


def test_a_folder_where_orbax_cannot_lock_its_files_is_refused(tmp_path, monkeypatch):
  """Orbax's library has several kinds of locks: it decides, and leaves no file."""

  def refused(*_):
    raise OSError(errno.ENOLCK, "No locks available")

  run = tmp_path / "not made yet" / "run"
  config = load([*KEYS, f"base_output_directory={run.parent}"])
  disk_space.require_locks(config)
  monkeypatch.setattr(fcntl, "lockf", refused)
  disk_space.require_locks(config)
  store = SimpleNamespace(result=lambda: (_ for _ in ()).throw(ValueError("UNAVAILABLE")))
  monkeypatch.setattr(tensorstore.KvStore, "open", lambda spec: store)
  text = rf"no checkpoint can be saved in {run}: Orbax locks its files .* of {tmp_path} has no locks\."
  with pytest.raises(ConfigError, match=text):
    disk_space.require_locks(config)
  disk_space.require_locks(load([*KEYS, f"base_output_directory={run.parent}", "enable_checkpointing=false"]))
  assert not list(tmp_path.iterdir())
