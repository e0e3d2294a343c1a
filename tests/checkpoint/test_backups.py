"""When each tier saves, and which state a restore chooses."""

from __future__ import annotations

import errno
import fcntl
import re
import shutil

import pytest
from tests.support import toy_state

from input_pipeline.locks import FolderLock
from trainer.checkpoint.checkpoint_errors import CheckpointError, NoGoodCheckpoint


def make(path, recorder=None, **changes):
  recorder = recorder or toy_state.Recorder()
  return toy_state.backups(
    toy_state.config(**({"checkpoint_period": 2} | changes)),
    str(path),
    recorder=recorder,
  )


def target(seed=0):
  return toy_state.abstract(toy_state.values(seed), toy_state.mesh(1, 2))


def run(path, steps, **changes):
  tiers = make(path, **changes)
  saved = [step for step in range(1, steps + 1) if tiers.save(step, toy_state.state(step), {}, last=step == steps)]
  tiers.close()
  return saved


def completed(tiers, step):
  """Whether a save is due after `step`."""
  tiers.completed(step)
  return tiers.due(step)


def test_storage_that_cannot_be_listed_keeps_no_slice_from_joining_the_others_and_restores_nothing(tmp_path):
  run(tmp_path, 2)
  recorder, checkpoints = toy_state.Recorder(), tmp_path / "checkpoints"
  tiers = make(tmp_path, recorder)
  assert tiers.newest() == 2
  checkpoints.rename(tmp_path / "aside")
  checkpoints.touch()
  assert tiers.newest() == 0 and "cannot be listed" in recorder.lines[-1]
  with pytest.raises(CheckpointError, match="cannot be listed"):
    tiers.restore_newest(target(), lambda meta: None)
  tiers.close()


def test_a_save_that_was_lost_with_a_slice_is_made_up_once(tmp_path):
  """An attempt that begins after the step of the lost save has no other reason to save before the next period."""
  assert run(tmp_path, 2, checkpoint_period=2) == [2]
  recorder = toy_state.Recorder()
  tiers = make(tmp_path, recorder)
  assert [completed(tiers, step) for step in (3, 4)] == [False, True]  # step 2 is committed
  assert tiers.save(4, toy_state.state(4), {}) and not completed(tiers, 5)
  tiers.close()
  shutil.rmtree(tmp_path / "checkpoints" / "4")
  tiers = make(tmp_path, recorder)
  assert not tiers.due(5) and completed(tiers, 5)
  saved, made_up = recorder.lines
  assert re.fullmatch(r"Saved checkpoint 4 in \d+\.\d s \(persistent\)\.", saved)
  assert made_up == "The checkpoint of step 4 was not committed: saving step 5 in its place."
  assert completed(tiers, 7) and len(recorder.lines) == 2  # until it is made up: step 5 was not saved
  assert tiers.save(7, toy_state.state(7), {}) and not completed(tiers, 9)
  tiers.close()
  assert make(tmp_path).restore_newest(target()).step == 7


def test_a_damaged_checkpoint_is_skipped_and_moved_aside(tmp_path):
  run(tmp_path, 6)
  root = tmp_path / "checkpoints"
  (root / "6" / "meta.json").unlink()
  (root / "8.orbax-checkpoint-tmp").mkdir()
  recorder = toy_state.Recorder()
  tiers = make(tmp_path, recorder)
  restored = tiers.restore_newest(target())
  assert restored.step == 4
  toy_state.assert_same_bits(restored.state, toy_state.values(4))
  aside = tmp_path / "checkpoints_rejected"
  assert sorted(p.name for p in aside.iterdir()) == ["6", "6.reason.txt"]
  assert f"Removed 1 from {root}: 8.orbax-checkpoint-tmp (its save did not finish)." in recorder.lines
  assert (aside / "6.reason.txt").read_text() == "meta.json is missing\n"
  assert "checkpoint_rejected" in recorder.kinds()
  assert tiers.save(6, toy_state.state(60), {})  # the step can be saved again
  tiers.close()
  toy_state.assert_same_bits(make(tmp_path).restore_newest(target()).state, toy_state.values(60))


@pytest.mark.parametrize("locks", [True, False])
def test_a_save_removes_what_killed_processes_have_left(tmp_path, monkeypatch, locks):
  """But not the save that another process writes now. Without locks, only what is older than the new checkpoint."""

  def flock(descriptor, kind):
    raise OSError(errno.ENOLCK, "No locks available")

  if not locks:
    monkeypatch.setattr(fcntl, "flock", flock)
  root, recorder = tmp_path / "checkpoints", toy_state.Recorder()
  for name in ("1.orbax-checkpoint-tmp", "3.orbax-checkpoint-tmp", "5.orbax-checkpoint-tmp", "1", "7 (copy)"):
    (root / name).mkdir(parents=True)
  (root / "1" / "DELETED").touch()
  tiers = make(tmp_path, recorder, max_num_checkpoints_to_keep=9)
  writer = FolderLock(root, shared=True)  # of another process
  tiers.save(2, toy_state.state(2), {})
  tiers.wait()
  names = lambda: sorted(path.name for path in root.iterdir())
  left = ["3.orbax-checkpoint-tmp", "5.orbax-checkpoint-tmp", "7 (copy)"]
  assert names() == (["1", "1.orbax-checkpoint-tmp", "2", *left] if locks else ["2", *left])
  del writer
  tiers.save(4, toy_state.state(4), {})
  tiers.close()
  assert names() == (["2", "4", "7 (copy)"] if locks else ["2", "4", *left[1:]])
  assert sum(line.startswith("Removed ") for line in recorder.lines) == (1 if locks else 2)
  first = next(line for line in recorder.lines if line.startswith("Removed "))
  assert first.startswith(f"Removed {4 if locks else 2} from {root}: 1")


def test_nothing_good_is_an_error_and_nothing_is_moved(tmp_path):
  run(tmp_path, 4)
  for step in ("2", "4"):
    (tmp_path / "checkpoints" / step / "manifest.json").unlink()
  with pytest.raises(NoGoodCheckpoint, match=r"none can be restored:\n  4: manifest.json is missing\n  2: manifest"):
    make(tmp_path).restore_newest(target())
  assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["2", "4"]


def test_a_lost_commit_marker_is_no_first_start(tmp_path):
  run(tmp_path, 2)
  (tmp_path / "checkpoints" / "2" / "commit_success.txt").unlink()
  with pytest.raises(NoGoodCheckpoint, match=r"2: it was sealed and has lost its commit_success.txt"):
    make(tmp_path).restore_newest(target())


@pytest.mark.parametrize("files", [(), ("manifest.json",), ("manifest.json", "commit_success.txt")])
def test_only_an_unfinished_first_save_is_a_first_start(tmp_path, files):
  """Killed before the folder gets its final name: before it is sealed, before its marker is written, and after that."""
  run(tmp_path, 2)
  step = tmp_path / "checkpoints" / "2"
  for name in {"manifest.json", "commit_success.txt"} - set(files):
    (step / name).unlink()
  step.rename(f"{step}.orbax-checkpoint-tmp")
  recorder = toy_state.Recorder()
  assert make(tmp_path, recorder).restore_newest(target()) is None
  assert "its save did not finish" in recorder.lines[0]
  assert list((tmp_path / "checkpoints").iterdir()) == []
