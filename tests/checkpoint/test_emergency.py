"""The emergency tier with simulated slices in one process: saves, lost copies, and restores."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tests.support import toy_state

from trainer.checkpoint import run_folder
from trainer.checkpoint.checkpoint_errors import CheckpointError, NonFiniteState, Rejected
from trainer.checkpoint.emergency import Emergency, folder
from trainer.world import SingleWorld

RUN = "out/run"
ID = "0123"  # of the run


def slices(number=2, of=4):
  return {i: jax.devices()[i * of : (i + 1) * of] for i in range(number)}


def config(path, **changes):
  defaults = {
    "enable_emergency_checkpoint": True,
    "local_checkpoint_directory": str(path / "ram"),
    "local_checkpoint_period": 1,
    "checkpoint_period": 10,
  }
  return toy_state.config(**(defaults | changes))


def tier(path, which=None, recorder=None, **changes):
  recorder = recorder or toy_state.Recorder()
  return Emergency(
    config(path, **changes),
    RUN,
    which or slices(),
    recorder.context(run_id=ID),
  )


def filled(path, steps=(1, 2), which=None, **changes):
  t = tier(path, which, **changes)
  for step in steps:
    t.save(step, toy_state.state(step), {"tokens": step})
  t.wait()
  return t


def restore(t, on=None):
  candidate = t.candidates()[0]
  target = toy_state.abstract(toy_state.values(), on or toy_state.mesh(2, 4))
  state, meta = t.restore(candidate, target, lambda meta: None)
  assert meta["tokens"] == candidate.step
  toy_state.assert_same_bits(state, toy_state.values(candidate.step))
  assert jax.tree.map(lambda x: x.sharding, state) == jax.tree.map(lambda x: x.sharding, target)
  return candidate.step


def files(t):
  return sorted(path.name for path in t.root.iterdir())


def test_writes_one_full_copy_per_slice_and_restores_it(tmp_path):
  t = filled(tmp_path)
  assert files(t) == [f"{step}.s{s}.p0.{kind}" for step in (1, 2) for s in (0, 1) for kind in ("bin", "json")]
  state_bytes = sum(np.asarray(x).nbytes for x in jax.tree.leaves(toy_state.values()))
  size = (t.root / "2.s1.p0.bin").stat().st_size
  assert state_bytes <= size <= state_bytes + 64 * 100  # padding of each part
  assert restore(t) == 2


def test_keeps_two_copies_the_one_in_writing_included(tmp_path):
  t = filled(tmp_path, steps=range(1, 6))
  assert {int(name.split(".")[0]) for name in files(t)} == {4, 5}


@pytest.mark.parametrize("lost", [0, 1])
def test_wiped_slice(tmp_path, lost):
  filled(tmp_path)
  for path in (tmp_path / "ram").glob(f"*/*/*.s{lost}.*"):
    path.unlink()
  assert restore(tier(tmp_path)) == 2


@pytest.mark.parametrize("data,fsdp", [(1, 1), (1, 4), (2, 2), (1, 8), (4, 2)])
def test_restores_onto_other_meshes(tmp_path, data, fsdp):
  filled(tmp_path)
  per_slice = {i: jax.devices()[i * fsdp : (i + 1) * fsdp] for i in range(data)}
  assert restore(tier(tmp_path, per_slice), toy_state.mesh(data, fsdp)) == 2


def damage_part(t, step, which, array):
  """Flips one bit in the part of `array` of the given slice."""
  from trainer.checkpoint import checksums

  index = checksums.parse((t.root / f"{step}.s{which}.p0.json").read_bytes(), "")
  offset = next(part["offset"] for part in index["parts"] if part["array"] == array)
  path = t.root / f"{step}.s{which}.p0.bin"
  data = bytearray(path.read_bytes())
  data[offset] ^= 16
  path.write_bytes(data)


def test_different_parts_lost_on_different_slices_are_united(tmp_path):
  t = filled(tmp_path)
  damage_part(t, 2, 0, "low")
  damage_part(t, 2, 1, "params.embedding")
  recorder = toy_state.Recorder()
  assert restore(tier(tmp_path, recorder=recorder)) == 2
  assert [line.split("/")[-1] for line in recorder.lines if "damaged" in line] == [
    "2.s0.p0.bin is damaged: 1 parts, the first of low.",
    "2.s1.p0.bin is damaged: 1 parts, the first of params.embedding.",
  ]


def test_the_same_part_lost_on_all_slices_rejects_the_step(tmp_path):
  t = filled(tmp_path)
  damage_part(t, 2, 0, "low")
  damage_part(t, 2, 1, "low")
  recorder = toy_state.Recorder()
  tiers = toy_state.backups(config(tmp_path), RUN, slices=slices(), recorder=recorder, run_id=ID)
  restored = tiers.restore_newest(toy_state.abstract(toy_state.values(), toy_state.mesh(2, 4)))
  assert (restored.step, restored.tier) == (1, "emergency")
  toy_state.assert_same_bits(restored.state, toy_state.values(1))
  assert any("is not used: a part of low is damaged or missing in every copy." in line for line in recorder.lines)
  assert ("checkpoint_rejected", {"step": 2, "tier": "emergency", "reason": "a part of low is damaged or missing in every copy"}) in recorder.events  # fmt: skip  # noqa: E501


def test_copies_of_different_histories_are_not_mixed(tmp_path):
  t = filled(tmp_path)
  for path in t.root.glob("2.s1.*"):
    shutil.copy(path, tmp_path / path.name)
  t.save(2, toy_state.state(7), {"tokens": 2})  # the step is repeated after a fallback, with another result
  t.wait()
  for path in tmp_path.glob("2.s1.*"):
    shutil.copy(path, t.root / path.name)
  candidates = t.candidates()
  assert [c.step for c in candidates] == [2, 2, 1]
  damage_part(t, 2, 0, "low")
  target = toy_state.abstract(toy_state.values(), toy_state.mesh(2, 4))
  outcomes = []
  for candidate in candidates[:2]:
    try:
      state, _ = t.restore(candidate, target, lambda meta: None)
      outcomes.append(int(state["step"]))
    except Rejected as error:
      outcomes.append(str(error))
  assert sorted(outcomes, key=str) == [200, "a part of low is damaged or missing in every copy"]


def test_unfinished_files_are_no_checkpoint_and_are_cleared(tmp_path):
  t = filled(tmp_path)
  for s in (0, 1):
    (t.root / f"3.s{s}.p0.bin").write_bytes(b"half")
    (t.root / f"3.s{s}.p0.json.tmp").write_bytes(b"half")
  assert restore(tier(tmp_path)) == 2
  t = tier(tmp_path)
  t.save(3, toy_state.state(3), {"tokens": 3})
  t.wait()
  assert restore(t) == 3 and not any(name.endswith("tmp") for name in files(t))


def test_a_state_that_is_not_finite_is_not_committed(tmp_path):
  t = filled(tmp_path)
  state = toy_state.state(3)
  state["low"] = state["low"].at[0].set(np.nan)
  t.save(3, state, {})
  with pytest.raises(NonFiniteState, match=r"step 3 is not finite \(low\)"):
    t.wait()
  assert restore(tier(tmp_path)) == 2


def test_write_errors_reach_the_training_thread(tmp_path):
  t = filled(tmp_path)
  shutil.rmtree(t.root)
  t.root.write_text("no folder")
  t.save(3, toy_state.state(3), {})
  with pytest.raises(CheckpointError, match=r"step 3 could not be saved in .*ram/run-"):
    t.wait()


def test_a_state_that_no_slice_holds_in_full_is_refused(tmp_path):
  mesh = toy_state.mesh(2, 4)
  target = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data")))}
  with pytest.raises(ValueError, match=r"w \[8, 8\] is sharded across slices"):
    toy_state.backups(config(tmp_path), RUN, slices=slices(), run_id=ID).restore_newest(target)


def test_tiers_take_the_newest_of_both(tmp_path):
  run = str(tmp_path / "run")
  target = toy_state.abstract(toy_state.values(), toy_state.mesh(2, 4))

  def tiers():
    return toy_state.backups(config(tmp_path, local_checkpoint_period=2, checkpoint_period=3), run, slices=slices())

  t = tiers()
  for step in range(1, 9):
    saved = t.save(step, toy_state.state(step), {"tokens": step})
    assert saved == (step % 2 == 0 or step % 3 == 0)
  t.close()
  restored = tiers().restore_newest(target)
  assert (restored.step, restored.tier, restored.path) == (
    8,
    "emergency",
    f"{folder(tmp_path / 'ram', run)}/{run_folder.read(run)}/8",
  )
  toy_state.assert_same_bits(restored.state, toy_state.values(8))
  for path in (tmp_path / "ram").glob("*/*/8.*"):
    path.unlink()
  restored = tiers().restore_newest(target)
  assert (restored.step, restored.tier) == (6, "emergency")  # both tiers have step 6: the local copy is faster to read
  shutil.rmtree(tmp_path / "ram")
  restored = tiers().restore_newest(target)
  assert (restored.step, restored.tier) == (6, "persistent")
  toy_state.assert_same_bits(restored.state, toy_state.values(6))


def new_tiers(path, recorder=None):
  recorder = recorder or toy_state.Recorder()
  run = str(path / "out" / "run")
  cfg = config(path, checkpoint_period=2)
  return toy_state.backups(cfg, run, slices=slices(), recorder=recorder)


def saved_run(path):
  """A run with local copies of steps 1 to 3 and a checkpoint of step 2; returns its id."""
  t = new_tiers(path)
  for step in (1, 2, 3):
    t.save(step, toy_state.state(step), {"tokens": step})
  t.close()
  return run_folder.read(str(path / "out" / "run"))


def test_a_new_run_folder_does_not_continue_from_local_copies_of_the_deleted_one(tmp_path):
  """`rm -rf` of the run's folder and the same command again: a fresh start, and the log says where the copies are."""
  old = saved_run(tmp_path)
  run = tmp_path / "out" / "run"
  shutil.rmtree(run)
  recorder = toy_state.Recorder()
  target = toy_state.abstract(toy_state.values(), toy_state.mesh(2, 4))
  tiers = new_tiers(tmp_path, recorder)
  assert tiers.restore_newest(target) is None
  (line,) = [line for line in recorder.lines if "earlier run" in line]
  assert line.startswith(f"Local copies of step 3 in {folder(tmp_path / 'ram', str(run))}/{old} are not used")
  tiers.save(1, toy_state.state(10), {"tokens": 1})
  tiers.close()
  assert new_tiers(tmp_path).restore_newest(target).step == 1
  # The message says how to continue the earlier run:
  assert f"write {old} into {run}/run_id" in line
  (run / "run_id").write_text(f"{old}\n")
  restored = new_tiers(tmp_path).restore_newest(target)
  assert (restored.step, restored.tier) == (3, "emergency")
  toy_state.assert_same_bits(restored.state, toy_state.values(3))


def test_the_only_copy_of_a_host_stays_until_the_next_one_is_complete(tmp_path, monkeypatch):
  """After a restart the host has the place of another slice. Its first save does not succeed."""
  filled(tmp_path, steps=(1, 2), which={0: slices()[0]})
  t = tier(tmp_path, {1: slices()[1]})
  monkeypatch.setattr(t, "_write", lambda *args: (_ for _ in ()).throw(OSError("no space")))
  t.save(3, toy_state.state(3, toy_state.mesh(1, 4, first=4)), {"tokens": 3})
  with pytest.raises(CheckpointError, match="no space"):
    t.wait()
  assert restore(t) == 2
  assert {int(name.split(".")[0]) for name in files(t)} == {2}


@pytest.mark.parametrize("operation", ["newest", "candidates", "restore"])
def test_a_disk_that_fails_on_one_process_fails_on_all_before_they_gather(tmp_path, monkeypatch, operation):
  class World(SingleWorld):
    def gather(self, value):
      gathered.append(value)
      return [value]

  t, gathered = filled(tmp_path), []
  candidate = t.candidates()[0]
  t._world = World()
  monkeypatch.setattr(Path, "iterdir", lambda self: (_ for _ in ()).throw(OSError(errno.ESTALE, "Stale file handle")))
  work = {"restore": lambda: t.restore(candidate, None, lambda meta: None)}.get(operation, getattr(t, operation))
  with pytest.raises(CheckpointError, match="Stale file handle"):
    work()
  assert len(gathered) == 1 and "Stale" in gathered[0][1], "the other processes wait for what this one found"
