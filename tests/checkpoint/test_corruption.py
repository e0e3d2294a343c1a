"""Damage to any file of any tier is noticed before training, and the newest good state is used."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from tests.support import toy_state
from tests.support.seeds import few

from trainer.checkpoint import checksums, emergency
from trainer.checkpoint.backups import Backups

LOCAL = {"enable_emergency_checkpoint": True, "local_checkpoint_period": 1}
# Files that a restore reads, and files of Orbax that it does not read. The manifest has checksums of both.
PERSISTENT = {
  "commit_success.txt": "commit_success.txt",
  "meta.json": "meta.json",
  "manifest.json": "manifest.json",
  "tree metadata": "state/_METADATA",
  "sharding": "state/_sharding",
  "array metadata": "state/array_metadatas/process_0",
  "item commit": "state/commit_success.txt",
  "root manifest": "state/manifest.ocdbt",
  "root data": "state/d/*",
  "process manifest": "state/ocdbt.process_0/manifest.ocdbt",
  "array data": "state/ocdbt.process_0/d/*",
}
ID = "0123"  # of the run with local copies
EMERGENCY = {"index": "*.json", "parts": "*.bin"}


def tiers(path: Path, recorder: toy_state.Recorder | None = None, *, local: bool = False) -> Backups:
  recorder = recorder or toy_state.Recorder()
  cfg = toy_state.config(
    checkpoint_period=1, **(LOCAL | {"local_checkpoint_directory": f"{path}/ram"} if local else {})
  )
  directory, run_id = ("run", ID) if local else (f"{path}/run", None)
  return toy_state.backups(cfg, directory, recorder=recorder, run_id=run_id)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  """Steps 1 and 2 in both tiers."""
  path = tmp_path_factory.mktemp("saved")
  persistent = tiers(path)
  local = toy_state.backups(
    toy_state.config(checkpoint_period=10, **LOCAL, local_checkpoint_directory=f"{path}/ram"),
    "run",
    run_id=ID,
  )
  for step in (1, 2):
    for t in (persistent, local):
      assert t.save(step, toy_state.state(step), {"tokens": step})
      t.wait()
  return path


def truncate(data: bytearray) -> bytes:
  return bytes(data[: len(data) // 2])


def flip(data: bytearray) -> bytes:
  data[len(data) // 2] ^= 1 << 5
  return bytes(data)


def flip_first(data: bytearray) -> bytes:
  data[0] ^= 1
  return bytes(data)


def flip_last(data: bytearray) -> bytes:
  data[-1] ^= 1 << 7
  return bytes(data)


def zero(data: bytearray) -> bytes:
  start = next(i for i in range(len(data) // 3, len(data)) if data[i])
  data[start : start + 64] = bytes(len(data[start : start + 64]))
  return bytes(data)


def delete(data: bytearray) -> None:
  return None


DAMAGES = [truncate, delete, flip, flip_first, flip_last, zero]


def damage(file: Path, how) -> None:
  before = file.read_bytes()
  after = how(bytearray(before))
  assert after != before
  if after is None:
    file.unlink()
  else:
    file.write_bytes(after)


def biggest(root: Path, pattern: str) -> Path:
  return max(root.glob(pattern), key=lambda p: p.stat().st_size)


def restore(path: Path, local: bool = False):
  recorder = toy_state.Recorder()
  restored = tiers(path, recorder, local=local).restore_newest(
    toy_state.abstract(toy_state.values(), toy_state.mesh(1, 2))
  )
  toy_state.assert_same_bits(restored.state, toy_state.values(restored.step))
  assert restored.meta["tokens"] == restored.step
  return restored.step, recorder


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("kind", PERSISTENT)
def test_persistent(tmp_path, saved, kind, how):
  shutil.copytree(saved / "run", tmp_path / "run")
  file = biggest(tmp_path / "run" / "checkpoints" / "2", PERSISTENT[kind])
  if kind == "commit_success.txt" and how is flip:
    how = flip_last  # the middle of the file is the path of the run at the commit, which no code reads
  damage(file, how)
  step, recorder = restore(tmp_path)
  assert step == 1
  rejected = tmp_path / "run" / "checkpoints_rejected"
  assert (rejected / "2").is_dir() and (rejected / "2.reason.txt").read_text()
  lost_marker = kind == "commit_success.txt" and how is delete
  assert lost_marker or "checkpoint_rejected" in recorder.kinds()


@pytest.mark.parametrize("seed", few(range(3), range(12)))
def test_a_flipped_bit_anywhere_in_array_data(tmp_path, saved, seed):
  shutil.copytree(saved / "run", tmp_path / "run")
  rng = random.Random(seed)
  files = sorted((tmp_path / "run" / "checkpoints" / "2" / "state").rglob("d/*"))

  def anywhere(data: bytearray) -> bytes:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)

  damage(rng.choice(files), anywhere)
  assert restore(tmp_path)[0] == 1


@pytest.mark.parametrize("seed", few(range(2), range(6)))
def test_fingerprints_alone_notice_changed_values(tmp_path, saved, seed):
  """As on an object store, where large files have no checksum: the manifest is written again after the damage."""
  shutil.copytree(saved / "run", tmp_path / "run")
  root = tmp_path / "run" / "checkpoints" / "2"
  row = toy_state.values(2)["big"][0].tobytes()
  file = next(path for path in root.glob(PERSISTENT["array data"]) if row in path.read_bytes())
  start = file.read_bytes().index(row)

  def in_row(data: bytearray) -> bytes:
    data[start + 5 * seed] ^= 1 << seed
    return bytes(data)

  damage(file, in_row)
  entries = checksums.parse((root / "manifest.json").read_bytes(), "")
  name = str(file.relative_to(root))
  entries[name]["crc32"] = checksums.file_crc(file)[1]
  (root / "manifest.json").write_bytes(checksums.dump(entries))
  step, recorder = restore(tmp_path)
  assert step == 1
  assert any("big does not have the fingerprint it was saved with" in line for line in recorder.lines)


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("kind", EMERGENCY)
def test_emergency(tmp_path, saved, kind, how):
  shutil.copytree(saved / "ram", tmp_path / "ram")
  damage(emergency.folder(f"{tmp_path}/ram", "run") / ID / f"2.s0.p0{EMERGENCY[kind][1:]}", how)
  step, recorder = restore(tmp_path, local=True)
  assert step == 1
  assert recorder.lines
