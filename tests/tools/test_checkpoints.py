"""trainer.tools.checkpoints: each folder is named with its state, also while a run writes."""

from __future__ import annotations

import re

import pytest
from tests.support import fake_run, toy_state

from input_pipeline.locks import FolderLock
from trainer.checkpoint import emergency
from trainer.tools import checkpoints


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A run with the checkpoints 2, 4 (damaged), 6 and 8 (damaged, moved away), a save of 9 and an export."""
  place = tmp_path_factory.mktemp("place")
  run, local = place / "run", str(place / "ram")
  config = {"enable_emergency_checkpoint": True, "local_checkpoint_directory": local}
  records = fake_run.FakeRun(run, steps=9, slices=1, config=config, host="node-7")
  for step in range(1, 9):
    records.step(step)
  records.close()
  cfg = toy_state.config(checkpoint_period=2, local_checkpoint_period=4, max_num_checkpoints_to_keep=9, **config)
  tiers = toy_state.backups(cfg, str(run))
  for step in range(1, 9):
    tiers.save(step, toy_state.state(step), {})
  tiers.close()
  root = run / "checkpoints"
  (root / "8" / "meta.json").unlink()
  tiers.save(8, toy_state.state(8), {}, last=True, is_new=False)
  (root / "8" / "commit_success.txt").unlink()
  (root / "4" / "meta.json").write_text("damaged")
  (root / "9.orbax-checkpoint-tmp").mkdir()
  (emergency.folder(local, str(run)) / "an earlier run").mkdir()
  (emergency.folder(local, str(run)) / "an earlier run" / "3.s0.p0.bin").write_bytes(bytes(70))
  return run


def rows(folder, capsys, *options):
  """The lines before the table, and {(step, kind): (size, state)}."""
  assert checkpoints.main([str(folder), *options]) == 0
  head, _, table = capsys.readouterr().out.partition("\n\n")
  lines = [re.split("  +", line, maxsplit=4) for line in table.splitlines()]
  assert lines[0] == ["STEP", "SIZE", "AGE", "KIND", "STATE"]
  return head, {(step, kind): (size, state) for step, size, _, kind, state in lines[1:]}


def test_each_folder_is_listed_with_its_state(folder, capsys):
  head, found = rows(folder, capsys)
  for step in ("2", "6"):
    size, state = found[(step, "checkpoint")]
    assert state == "committed" and 30 <= float(size.removesuffix(" kB")) < 50
  assert found[("8", "checkpoint")][1] == "it has no commit_success.txt"
  assert found[("8", "rejected")][1] == "meta.json is missing"
  save = ("0 bytes", "its save did not finish; the next save or start removes it")
  assert found[("9.orbax-checkpoint-tmp", "checkpoint")] == save
  local = emergency.folder(folder.parent / "ram", str(folder))
  assert found[("8", "local copy")][1] == f"slices 0 in {local / (folder / 'run_id').read_text().strip()}"
  assert found[("-", "local copy")] == ("70 bytes", f"of an earlier run in {local}/an earlier run")
  assert f"{folder}: checkpoint " in head and "free on this disk" in head
  assert re.search(r"last record: .* ago at step 8, by process \w{8} on host node-7; it trains, or was killed", head)


def test_a_save_under_way_is_not_called_killed(folder, capsys):
  writer = FolderLock(folder / "checkpoints", shared=True)
  _, found = rows(folder, capsys)
  assert found[("9.orbax-checkpoint-tmp", "checkpoint")][1] == "its save did not finish; a process writes now"
  assert writer.entered


def test_a_folder_that_is_no_run_is_2_with_one_line(tmp_path, capsys):
  assert checkpoints.main([str(tmp_path)]) == checkpoints.main([str(tmp_path / "none")]) == 2
  lines = capsys.readouterr().err.splitlines()
  assert [line.partition(" is not the folder of a run")[1] != "" for line in lines] == [True, True]
