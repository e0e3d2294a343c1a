"""How the command ends with 0, 1 or 2: what it prints and leaves, and that the same command resumes."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal

import pytest
from tests.support import command
from tests.support.command import Run
from tests.support.command_runs import ENDLESS, assert_stopped, start_and_train, write_text
from tests.support.seeds import few

from trainer.checkpoint import emergency

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore:Sharding info not provided")]


# ---- 0 and 2


def test_a_file_size_limit_is_1_the_complete_run_is_0_and_so_is_a_repetition(make):
  """A full disk without a mount: a limit on the size of the files of the first process."""
  run = make("steps=4")
  limit = 24_000  # bytes: log.txt and the records fit, the arrays do not
  process = run.start(PYTHONDONTWRITEBYTECODE="1")  # else modules that it imports first would have half their byte code
  resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, limit))
  assert process.wait(240) == 1
  assert "step 3 could not be saved in" in (run.directory / "log.txt").read_text()
  assert run.committed_steps() == []
  assert run.finish() == 0
  assert all(record["z_loss"] > 0 for record in run.records("metrics"))
  assert run.committed_steps() == [3, 4]
  assert run.finish() == 0
  assert "All 4 steps are done already." in run.printed
  assert run.finish("steps=2") == 0
  assert "All 2 steps are done already (the checkpoint is of step 4)." in run.printed
  assert run.committed_steps() == [3, 4] and sorted(run.losses()) == [1, 2, 3, 4]


def test_a_configuration_that_proves_wrong_inside_an_attempt_is_2_with_one_message(make, tmp_path):
  local = tmp_path / "ram"
  emergency_keys = (
    "enable_emergency_checkpoint=true",
    "local_checkpoint_period=1",
    f"local_checkpoint_directory={local}",
  )
  run = make("steps=3", "num_slices=2", *emergency_keys)
  assert run.finish("dcn_fsdp_parallelism=2") == 2
  assert "so that no slice holds a full copy" in run.printed and "Traceback" not in run.printed
  folder = emergency.folder(local, str(run.directory))
  assert not folder.exists()
  local.mkdir(exist_ok=True)
  folder.touch()
  assert run.finish() == 2
  assert "cannot be written" in run.printed and "Traceback" not in run.printed
  assert run.last_step == 0 and [event["exit"] for event in run.events("run_end")] == [2]


def test_a_resume_with_another_model_data_or_batch_size_is_2_unless_it_is_allowed(make):
  """Steps of 4 examples after steps of 2: no example is skipped or repeated, and the token count stays right."""
  run = make()
  assert run.finish("steps=3") == 0
  accepted = (run.directory / "config.yml").read_text()
  changed = "gradient_clipping_threshold=0.9", "learning_rate=0.001", "per_device_batch_size=4"
  assert run.finish("steps=6", *changed, "init_weights_seed=5", "data_shuffle_seed=7") == 2
  for key, values, what in (
    ("init_weights_seed", "0 -> 5", "model"),
    ("data_shuffle_seed", "0 -> 7", "data order"),
    ("global_batch_size", "2 -> 4", "data order"),
  ):
    assert re.search(rf"{key} +{values} +changes the {what}\n", run.printed)
  assert "allow_config_change=" in run.printed and "files have changed" not in run.printed
  assert "Traceback" not in run.printed
  assert run.committed_steps() == [3] and run.last_step == 3
  assert (run.directory / "config.yml").read_text() == accepted
  allowed = *changed, "allow_config_change=global_batch_size"
  assert run.finish("steps=6", *allowed) == 0
  assert "learning_rate: 0.001" in (run.directory / "config.yml").read_text()
  assert "learning_rate: 0.0003 in the checkpoint, now 0.001" in run.printed
  length = run.records("metrics")[0]["tokens"] // 2
  assert [record["tokens"] // length for record in run.records("metrics")] == [2, 4, 6, 10, 14, 18]
  assert run.finish("steps=9", *allowed) == 0
  assert [record["tokens"] // length for record in run.records("metrics")][6:] == [22, 26, 30]


def test_a_second_process_is_2_or_waits_and_goes_on_after_the_first_one_stops(make):
  """The first one stops on SIGTERM: no step is lost or repeated."""
  run = make(f"steps={ENDLESS}", "checkpoint_period=1000000")
  process = start_and_train(run, 3)
  assert run.finish("autocheckpoint_grace_seconds=1") == 2
  assert f"error: another process is training in {run.directory}" in run.printed
  waiting = run.start()  # as if a scheduler starts the next process while the previous one still saves
  assert command.wait_until(waiting, lambda: "waiting up to 25 s" in run.printed)
  process.send_signal(signal.SIGTERM)
  stopped = assert_stopped(run, process)
  assert command.wait_until(waiting, lambda: run.last_step >= stopped + 3)
  waiting.send_signal(signal.SIGTERM)
  last = assert_stopped(run, waiting)
  assert [record["step"] for record in run.records("metrics")] == list(range(1, last + 1))
  assert [event["step"] for event in run.events("checkpoint_restored")] == [stopped]


# ---- 1


def test_a_data_error_during_the_run_is_1_and_the_run_resumes_once_the_data_is_back(make, tmp_path):
  run = make(*write_text(tmp_path), f"steps={ENDLESS}")
  process = start_and_train(run, 4)
  good = {path: path.read_bytes() for path in (tmp_path / "tokens").rglob("*") if path.is_file()}
  for path, data in good.items():
    with path.open("r+b") as file:  # in place, because the run has it open
      file.write(os.urandom(len(data)))
  assert process.wait(240) == 1
  assert "DataError" in run.printed and "Traceback" in run.printed
  assert run.events("run_end")[-1]["exit"] == 1
  last = run.last_step
  assert run.committed_steps() and run.committed_steps()[-1] <= last
  for path, data in good.items():
    path.write_bytes(data)
  process = start_and_train(run, last + 2)
  assert run.losses()
  process.send_signal(signal.SIGTERM)
  assert process.wait(240) == 42


def break_by_a_file(run: Run) -> None:
  """Replaces the checkpoint folder by a file: not even root can write there."""
  root = run.directory / "checkpoints"
  while root.exists():  # the run may save there meanwhile
    shutil.rmtree(root, ignore_errors=True)
    try:
      root.touch(exist_ok=False)
    except FileExistsError:
      continue
    return


def break_by_a_link(run: Run) -> None:
  """Replaces the checkpoint folder by a link to a disk that does not exist."""
  root = run.directory / "checkpoints"
  root.rename(root.with_name("kept"))
  root.symlink_to("/nonexistent/disk")


@pytest.mark.parametrize("breaks", few([break_by_a_file], [break_by_a_file, break_by_a_link]))
def test_a_checkpoint_folder_that_becomes_unwritable_is_1_at_the_end(make, breaks):
  run = make(f"steps={ENDLESS}")
  process = start_and_train(run, 4)
  assert command.wait_until(process, lambda: bool(run.committed_steps()))
  breaks(run)
  assert command.wait_until(process, lambda: len(run.events("checkpoint_failed")) >= 2), run.printed[-4000:]
  lines = [line for line in run.printed.splitlines() if f"could not be saved in {run.directory}/checkpoints" in line]
  assert len(lines) >= 2
  assert all(re.search(r"The newest checkpoint in storage is of step [369]\d*, from 0:0\d:", line) for line in lines)
  process.send_signal(signal.SIGTERM)
  assert process.wait(240) == 1
  assert run.events("run_end")[-1]["exit"] == 1


def test_a_base_folder_that_was_moved_away_is_1_and_no_new_folder_is_made(make):
  run = make(f"steps={ENDLESS}")
  process = start_and_train(run, 4)
  base = run.directory.parent
  base.rename(base.with_name("moved"))
  assert process.wait(240) == 1
  assert f"{run.directory} was moved, deleted or replaced during the run" in run.printed
  assert not run.committed_steps()


def test_a_loss_that_is_not_a_number_is_1_and_is_never_committed(make):
  """Skipped steps do not replace checkpoints."""
  keys = [
    "learning_rate=1e9",
    "adam_weight_decay=1000",
    "warmup_steps_fraction=0",
    "gradient_clipping_threshold=0",
    "checkpoint_period=1",
  ]
  run = make(*keys, "steps=16", "max_num_checkpoints_to_keep=2")
  assert run.finish() == 1
  assert "TrainingDiverged" in run.printed
  assert run.events("run_end")[-1]["exit"] == 1
  assert run.committed_steps() == [1, 2] and run.last_step == 13  # ten steps are skipped, one more ends the run
  assert run.finish("max_nonfinite_steps=20") == 0
  reason = "because their loss or gradient was not finite"
  assert f"warning: the last 14 steps were skipped, {reason}: the weights are those of step 2" in run.printed
  assert run.committed_steps() == [2, 16]
  assert all(_finite(x) for x in run.arrays(16).values())


def test_a_step_that_does_not_fit_in_memory_is_1_and_says_what_needs_less(make):
  # The state is small, and the attention scores have 2 x 2^20 x 2^20 elements.
  run = make("steps=3", "attention=dot_product", f"max_target_length={2**20}", "per_device_batch_size=1")
  assert run.finish() == 1
  assert "RESOURCE_EXHAUSTED" in run.printed
  assert "error: The devices have too little memory for this run. Lower per_device_batch_size" in run.printed


def _finite(x) -> bool:
  import jax

  return all(bool((abs(leaf) < float("inf")).all()) for leaf in jax.tree.leaves(x))
