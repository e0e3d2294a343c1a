"""How the command ends: its exit code, what it says, what it leaves, and that the same command goes on from there."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from end_to_end import command
from end_to_end.command import ROOT, Run
from tests.support.forked_runs import Server
from tests.support.jax_processes import free_port

from trainer.checkpoint import emergency
from trainer.report import history, page

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore:Sharding info not provided")]
ENDLESS = 10**6
# One device and few arrays: what is started and ended here many times should be quick at both.
# A fixed schedule: runs of any length share one compiled program.
KEYS = (
  "dataset_type=synthetic vocab_size=64 opt_type=sgd num_slices=1 checkpoint_period=3 learning_rate_schedule_steps=1000"
).split()


@pytest.fixture(scope="module")
def server():
  s = Server()
  yield s
  s.close()


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
  return f"jax_cache_dir={tmp_path_factory.mktemp('compiled')}"


@pytest.fixture
def make(server, cache, tmp_path):
  """make(key=value, ...) -> a run of its own; what it has started is ended with the test."""
  processes = []

  def start(argv, changes, log):
    processes.append(server.start(argv, changes, log))
    return processes[-1]

  yield lambda *keys: Run(tmp_path / "a", [*KEYS, cache, *keys], start)
  for process in processes:
    if process.poll() is None:
      process.send_signal(signal.SIGKILL)
      process.wait(60)


def after(run: Run, step: int, *keys: str, **changes: str):
  """A process of the run that has done `step` steps."""
  process = run.start(*keys, **changes)
  assert command.wait_until(process, lambda: run.last_step >= step), run.printed[-4000:]
  return process


def text(folder: Path, lines: int = 4000) -> list[str]:
  """Keys for a corpus of its own in `folder`."""
  (folder / "text").mkdir(parents=True)
  (folder / "text" / "a.txt").write_text("".join(f"{i} lines are enough to train on\n" for i in range(lines)))
  return [
    "dataset_type=text",
    "vocab_size=258",
    f"dataset_path={folder / 'text'}",
    f"dataset_cache_directory={folder / 'tokens'}",
  ]


# ---- 0 and 2


def test_a_complete_run_is_0_and_so_is_a_repetition(make):
  run = make("steps=4", "z_loss_multiplier=0.001")
  assert run.finish() == 0
  assert all(record["z_loss"] > 0 for record in run.records("metrics"))
  assert run.committed_steps() == [3, 4]
  assert run.finish() == 0
  assert "All 4 steps are done already." in run.printed
  assert run.finish("steps=2") == 0
  assert "All 2 steps are done already (the checkpoint is of step 4)." in run.printed
  assert run.committed_steps() == [3, 4] and sorted(run.losses()) == [1, 2, 3, 4]


def test_layers_that_are_not_scanned_are_saved_on_eight_devices(make):
  """A hundred arrays: when their checksums were all under way at once, the devices waited for each other for ever."""
  run = make("steps=2", "scan_layers=false", "base_num_decoder_layers=4", "opt_type=adamw", "devices_per_slice=8")
  assert run.finish() == 0
  assert run.committed_steps() == [2]


@pytest.mark.parametrize(
  ("keys", "told"),
  [
    (["step=4"], "steps"),
    (["checkpoint_period=0"], "checkpoint_period"),
    (["num_slices=3", "dcn_data_parallelism=2"], "dcn_data_parallelism"),
    (["enable_emergency_checkpoint=true"], "local_checkpoint_directory"),
    (["elastic_enabled=true", "elastic_min_slice_count=2"], "elastic_min_slice_count=2"),
    (["elastic_enabled=true", "num_slices=2", "fault_injection=slice_down@1:99"], "the last slice is 1"),
    (["elastic_enabled=true", "num_slices=2", "steps=3", "fault_injection=slice_down@99:1"], "would never happen"),
  ],
  ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_a_wrong_configuration_is_2_with_one_message(tmp_path, keys, told):
  run = Run(tmp_path / "a", KEYS)
  process = run.start(*keys)
  assert command.wait_for_exit(process) == 2
  printed = run.printed
  assert printed.startswith("error: ") and told in printed and "Traceback" not in printed
  assert len(printed.splitlines()) <= 6
  assert not run.directory.exists()


def test_a_folder_that_fails_when_it_is_opened_is_2_with_one_message(tmp_path):
  run = Run(tmp_path / "a", KEYS)
  run.directory.mkdir(parents=True)
  (run.directory / "log.txt").symlink_to("nowhere/log.txt")
  assert command.wait_for_exit(run.start()) == 2
  assert "log.txt" in run.printed and "Traceback" not in run.printed
  assert len(run.printed.splitlines()) == 2


def test_a_configuration_that_proves_wrong_inside_an_attempt_is_2_with_one_message(make, tmp_path):
  local = tmp_path / "ram"
  emergency_keys = (
    "enable_emergency_checkpoint=true",
    "local_checkpoint_period=1",
    f"local_checkpoint_directory={local}",
  )
  run = make("steps=3", "num_slices=2", *emergency_keys)
  sharded = "dcn_fsdp_parallelism=2", "dcn_data_parallelism=1"
  assert run.finish(*sharded) == 2
  assert "so that no slice holds a full copy" in run.printed and "Traceback" not in run.printed
  folder = emergency.folder(local, str(run.directory))
  shutil.rmtree(folder)
  folder.touch()
  assert run.finish() == 2
  assert "cannot be written" in run.printed and "Traceback" not in run.printed
  assert run.last_step == 0 and [event["exit"] for event in run.events("run_end")] == [2, 2]


def test_another_batch_size_goes_on_with_the_next_example_where_that_is_allowed(make):
  """Steps of 8 examples after steps of 4: no example is left out or done twice, and the tokens are those trained on."""
  run = make()
  assert run.finish("steps=3", "per_device_batch_size=4") == 0
  assert run.finish("steps=6", "per_device_batch_size=8") == 2
  assert re.search(r"global_batch_size +4 -> 8 +changes the data order\n", run.printed)
  assert "files have changed" not in run.printed
  allowed = "per_device_batch_size=8", "allow_config_change=global_batch_size"
  assert run.finish("steps=6", *allowed) == 0
  length = run.records("metrics")[0]["tokens"] // 4
  assert [record["tokens"] // length for record in run.records("metrics")] == [4, 8, 12, 20, 28, 36]
  assert run.finish("steps=9", *allowed) == 0
  assert [record["tokens"] // length for record in run.records("metrics")][6:] == [44, 52, 60]


def test_a_resume_with_another_model_or_data_is_2_and_names_the_keys(make):
  run = make()
  assert run.finish("steps=3") == 0
  accepted = (run.directory / "config.yml").read_text()
  assert run.finish("steps=6", "gradient_clipping_threshold=0.9", "init_weights_seed=5", "data_shuffle_seed=7") == 2
  assert re.search(r"init_weights_seed +0 -> 5 +changes the model", run.printed)
  assert (
    re.search(r"data_shuffle_seed +0 -> 7 +changes the data order", run.printed)
    and "allow_config_change=" in run.printed
  )
  assert "Traceback" not in run.printed
  assert run.committed_steps() == [3] and run.last_step == 3
  assert (run.directory / "config.yml").read_text() == accepted
  found = history.load(str(run.directory))
  assert found.start["config"]["steps"] == 3 and [end["exit"] for end in found.of_kind("run_end")] == [0]
  assert run.finish("steps=6", "gradient_clipping_threshold=0.9", "learning_rate=0.001") == 0  # what people do change
  assert "learning_rate: 0.001" in (run.directory / "config.yml").read_text()
  assert "learning_rate: 0.0003 in the checkpoint, now 0.001" in run.printed
  assert run.last_step == 6


def test_text_of_one_line_is_trained_on_without_an_evaluation_unless_one_is_asked_for(make, tmp_path):
  run = make(*text(tmp_path, lines=0), "steps=2")
  (tmp_path / "text" / "a.txt").write_text("one line is enough to train on " * 20)
  assert run.finish("eval_interval=1") == 2
  assert "has 0 tokens to learn" in run.printed and not run.directory.exists()
  assert run.finish() == 0
  assert "No evaluation: nothing is held out (eval_fraction=0.05" in run.printed
  assert run.last_step == 2 and not run.events("eval")


def test_a_second_process_on_the_same_run_is_2_and_does_no_harm(make):
  run = make(f"steps={ENDLESS}")
  process = after(run, 3)
  assert run.finish("autocheckpoint_grace_seconds=1") == 2
  assert f"error: another process is training in {run.directory}" in run.printed
  waiting = run.start()  # as when a scheduler starts the next process while the last one still saves
  assert command.wait_until(waiting, lambda: "waiting up to 25 s" in run.printed)
  process.send_signal(signal.SIGTERM)
  stopped = assert_stopped(run, process)
  assert command.wait_until(waiting, lambda: run.last_step >= stopped + 3)
  waiting.send_signal(signal.SIGTERM)
  last = assert_stopped(run, waiting)
  assert [record["step"] for record in run.records("metrics")] == list(range(1, last + 1))


# ---- 1


def test_a_data_error_in_mid_run_is_1_and_the_run_goes_on_once_the_data_is_back(make, tmp_path):
  run = make(*text(tmp_path), f"steps={ENDLESS}", "prefetch_buffer_size=0")
  process = after(run, 4)
  good = {path: path.read_bytes() for path in (tmp_path / "tokens").rglob("*") if path.is_file()}
  for path, data in good.items():
    with path.open("r+b") as file:  # in place: it is open
      file.write(os.urandom(len(data)))
  assert process.wait(240) == 1
  assert "DataError" in run.printed and "Traceback" in run.printed
  assert run.events("run_end")[-1]["exit"] == 1
  last = run.last_step
  assert run.committed_steps() and run.committed_steps()[-1] <= last
  for path, data in good.items():
    path.write_bytes(data)
  process = after(run, last + 2)
  assert run.losses()
  process.send_signal(signal.SIGTERM)
  assert process.wait(240) == 42


def break_by_a_file(run: Run) -> None:
  """The folder is gone and a file has its name: not even root can write there."""
  root = run.directory / "checkpoints"
  while root.exists():  # while the run saves there
    shutil.rmtree(root, ignore_errors=True)
    try:
      root.touch(exist_ok=False)
    except FileExistsError:
      continue
    return


def break_by_a_link(run: Run) -> None:
  """The disk it was on is gone."""
  root = run.directory / "checkpoints"
  root.rename(root.with_name("kept"))
  root.symlink_to("/nonexistent/disk")


@pytest.mark.parametrize("breaks", [break_by_a_file, break_by_a_link])
def test_a_checkpoint_folder_that_cannot_be_written_any_more_is_1(make, breaks):
  run = make(f"steps={ENDLESS}")
  process = after(run, 4)
  breaks(run)
  assert process.wait(240) == 1
  assert f"could not be saved in {run.directory}/checkpoints" in run.printed
  assert run.events("run_end")[-1]["exit"] == 1


def test_a_checkpoint_folder_that_was_deleted_is_made_again(make):
  """Also where it goes between a commit and the look at what retention keeps, and takes along what would be deleted."""
  run = make(f"steps={ENDLESS}", "checkpoint_period=500", "max_num_checkpoints_to_keep=1")
  process = run.start()
  assert command.wait_until(process, lambda: run.committed_steps() == [500])
  (run.directory / "checkpoints").rename(run.directory / "gone")
  assert command.wait_until(process, lambda: max(run.committed_steps(), default=0) >= 1500), run.printed[-4000:]
  process.send_signal(signal.SIGTERM)
  assert process.wait(240) == 42


def test_a_full_disk_is_1_and_the_run_goes_on_once_there_is_room(make, tmp_path):
  disk = tmp_path / "a" / "out"
  disk.mkdir(parents=True)
  mount = ["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", str(disk)]
  result = subprocess.run(mount, capture_output=True, text=True, timeout=30, check=False)
  if result.returncode != 0:
    pytest.skip(f"mounting a small tmpfs is not permitted here: {result.stderr.strip()}")
  try:
    run = make("steps=30", "checkpoint_keep_period=1")
    assert run.finish() == 1
    assert "could not be saved" in run.printed and "check space" in run.printed
    saved = run.committed_steps()
    assert saved and saved[-1] < 30
    subprocess.run(["mount", "-o", "remount,size=50m", str(disk)], timeout=30, check=True)
    assert run.finish() == 0
    assert run.events("checkpoint_restored")[-1]["step"] == saved[-1]
    assert sorted(run.losses()) == list(range(1, 31))
  finally:
    subprocess.run(["umount", "-l", str(disk)], timeout=30, check=True)


def test_a_file_that_may_not_grow_is_1(tmp_path, cache):
  """The same where nothing may be mounted: by a limit on the size of the process's files."""
  run = Run(tmp_path / "a", [*KEYS, cache, "steps=6"])
  limit = 12_000  # bytes: the records fit, the arrays do not

  def limited() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

  result = subprocess.run(
    [sys.executable, "-m", "trainer", *run.argv()],
    env=command.cpu_environment({}),
    cwd=ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    timeout=240,
    preexec_fn=limited,
  )
  assert result.returncode == 1
  assert "step 3 could not be saved in" in result.stdout
  assert run.committed_steps() == []


def test_a_loss_that_is_not_a_number_is_1_and_is_never_committed(make):
  run = make("steps=30", "learning_rate=1e30", "warmup_steps_fraction=0", "gradient_clipping_threshold=0")
  assert run.finish() == 1
  assert "TrainingDiverged" in run.printed or "NonFiniteState" in run.printed
  assert run.events("run_end")[-1]["exit"] == 1
  for step in run.committed_steps():
    assert all(_finite(x) for x in run.arrays(step).values())


def test_steps_that_are_skipped_push_out_no_checkpoint(make):
  keys = ["learning_rate=1e30", "warmup_steps_fraction=0", "gradient_clipping_threshold=0", "checkpoint_period=1"]
  run = make(*keys, "steps=8", "max_nonfinite_steps=3", "max_num_checkpoints_to_keep=2")
  assert run.finish() == 1
  assert "TrainingDiverged" in run.printed
  assert run.committed_steps() == [1]
  assert run.finish("max_nonfinite_steps=10") == 0
  assert "warning: the last 7 steps were skipped: the weights are those of step 1" in run.printed
  assert run.committed_steps() == [1, 8]


def test_more_than_the_memory_is_1_and_says_what_takes_less(make):
  run = make("steps=3", "base_num_decoder_layers=1000000000")
  assert run.finish() == 1
  assert "RESOURCE_EXHAUSTED" in run.printed
  assert "error: the devices have too little memory for this run. Lower per_device_batch_size" in run.printed


def _finite(x) -> bool:
  import jax

  return all(bool((abs(leaf) < float("inf")).all()) for leaf in jax.tree.leaves(x))


# ---- 130


@pytest.mark.parametrize(
  "keys", [["checkpoint_period=2"], ["enable_checkpointing=false"]], ids=["saving", "not saving"]
)
def test_ctrl_c_between_steps_is_130_with_one_line(make, keys):
  run = make(f"steps={ENDLESS}", *keys)
  process = after(run, 5)
  process.send_signal(signal.SIGINT)
  assert process.wait(60) == 130, run.printed[-4000:]
  assert "Traceback" not in run.printed
  again = "goes on from the last checkpoint" if keys == ["checkpoint_period=2"] else "starts from step 0"
  assert run.printed.splitlines()[-1] == f"Interrupted: the same command {again}."
  assert run.events("run_end")[-1]["exit"] == 130
  assert "ended with exit code 130" in Path(page.write(str(run.directory))).read_text()
  last = run.last_step
  process = after(run, last + 2) if keys == ["checkpoint_period=2"] else run.start()
  assert command.wait_until(process, lambda: len(run.events("init_done")) == 2)
  process.send_signal(signal.SIGINT)
  assert process.wait(60) == 130
  assert run.losses()  # what was done again came out the same


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 42)], ids=["SIGINT", "SIGTERM"])
def test_a_signal_in_the_first_compilation_ends_the_process_at_once(make, number, code):
  """The compilation would take longer than a scheduler waits, and there is nothing to save."""
  run = make("steps=9", "base_num_decoder_layers=60", "scan_layers=false", "jax_cache_dir=")
  process = run.start()
  assert command.wait_until(process, lambda: bool(run.events("attempt_start")))
  time.sleep(1)  # it is in the compiler now
  begin = time.monotonic()
  process.send_signal(number)
  assert process.wait(60) == code, run.printed[-4000:]
  assert time.monotonic() - begin < 10
  assert "Traceback" not in run.printed and [event["exit"] for event in run.events("run_end")] == [code]
  assert run.last_step == 0 and not run.committed_steps()


def test_ctrl_c_before_the_run_is_130_without_a_traceback(make, tmp_path):
  run = make(*text(tmp_path, lines=400_000), "steps=2")
  process = run.start()
  assert command.wait_until(process, lambda: (tmp_path / "tokens").is_dir())  # it tokenises
  process.send_signal(signal.SIGINT)
  assert process.wait(60) == 130, run.printed[-4000:]
  assert run.printed.splitlines() == ["Interrupted."] and not run.directory.exists()


# ---- 42


def assert_stopped(run: Run, process) -> int:
  """The step at which the process stopped and committed."""
  assert process.wait(240) == 42, run.printed[-4000:]
  assert run.events("run_end")[-1]["exit"] == 42
  assert "SIGTERM received" in run.printed
  assert run.events("preemption")[-1]["signal"] == "SIGTERM"
  assert run.committed_steps()[-1] == run.last_step
  return run.last_step


def test_sigterm_is_42_and_no_step_is_lost_or_done_again(make):
  run = make(f"steps={ENDLESS}", "checkpoint_period=1000000")
  process = after(run, 3)
  process.send_signal(signal.SIGTERM)
  first = assert_stopped(run, process)
  process = after(run, first + 3)
  process.send_signal(signal.SIGTERM)
  last = assert_stopped(run, process)
  assert [record["step"] for record in run.records("metrics")] == list(range(1, last + 1))
  assert run.events("checkpoint_restored")[0]["step"] == first


def test_an_evaluation_due_at_the_step_of_a_sigterm_is_done_once_after_the_resume(make, tmp_path):
  """Also if the processes after it are killed, before that evaluation and between it and the next checkpoint."""
  run = make(*text(tmp_path), f"steps={ENDLESS}", "eval_interval=1", "eval_steps=1", "checkpoint_period=1000000")

  def evaluated() -> list[int]:
    return [record["step"] for record in run.records("metrics") if "eval_loss" in record]

  process = after(run, 3)
  process.send_signal(signal.SIGTERM)
  stopped = assert_stopped(run, process)
  assert evaluated() == list(range(1, stopped))
  process = run.start()
  assert command.wait_until(process, lambda: bool(run.events("checkpoint_restored")), pause=0.001), run.printed[-4000:]
  process.send_signal(signal.SIGKILL)
  process.wait(60)
  process = run.start()
  assert command.wait_until(process, lambda: stopped in evaluated(), pause=0.001), run.printed[-4000:]
  process.send_signal(signal.SIGKILL)
  process.wait(60)
  for _ in range(2):
    assert run.finish(f"steps={stopped + 2}") == 0, run.printed[-4000:]
    assert evaluated().count(stopped) == 1
  assert set(evaluated()) == set(range(1, max(evaluated()) + 1))
  assert run.losses()


def test_sigterm_to_one_of_two_processes_stops_both_at_the_same_step(make):
  run = make(f"steps={ENDLESS}", "checkpoint_period=1000000", "num_slices=2")
  world = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}", "JAX_NUM_PROCESSES": "2"}
  processes = [run.start(**world, JAX_PROCESS_ID=str(i)) for i in range(2)]
  assert command.wait_until(processes[0], lambda: run.last_step >= 3), run.printed[-4000:]
  processes[1].send_signal(signal.SIGTERM)
  assert [process.wait(240) for process in processes] == [42, 42], run.printed[-4000:]
  assert run.committed_steps() == [run.last_step]
  one = run.finish("steps=" + str(run.last_step + 2), timeout=240)  # one process takes over from two
  assert one == 0, run.printed[-4000:]


WRAPPED = {
  "exec": "{command}",
  "after another": "true && {command}",
  "trap": "trap 'kill -TERM $child' TERM; {command} & child=$!; wait $child; code=$?; "
  "while kill -0 $child 2>/dev/null; do wait $child; code=$?; done; exit $code",
}


@pytest.mark.parametrize("how", WRAPPED)
def test_sigterm_to_a_bash_wrapper_is_42(tmp_path, cache, how):
  run = Run(tmp_path / "a", [*KEYS, cache, f"steps={ENDLESS}"])
  line = WRAPPED[how].format(command=" ".join([sys.executable, "-m trainer", *run.argv()]))
  with run.log.open("wb") as log:
    wrapper = subprocess.Popen(
      ["bash", "-c", line], env=command.cpu_environment({}), cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
    )
  assert command.wait_until(wrapper, lambda: run.last_step >= 3), run.printed
  wrapper.send_signal(signal.SIGTERM)
  assert_stopped(run, wrapper)


def test_sigterm_to_the_group_of_a_bash_wrapper_is_one_notice(tmp_path, cache):
  """As `timeout` and tini -g do. bash itself ends at once; the command must still do all it has to."""
  run = Run(tmp_path / "a", [*KEYS, cache, f"steps={ENDLESS}"])
  line = " ".join([sys.executable, "-m trainer", *run.argv()]) + "; echo ended with $?"
  with run.log.open("wb") as log:
    wrapper = subprocess.Popen(
      ["bash", "-c", line],
      env=command.cpu_environment({}),
      cwd=ROOT,
      stdout=log,
      stderr=subprocess.STDOUT,
      start_new_session=True,
    )
  assert command.wait_until(wrapper, lambda: run.last_step >= 3), run.printed
  os.killpg(wrapper.pid, signal.SIGTERM)
  wrapper.wait(60)
  deadline = time.monotonic() + 120
  while not run.events("run_end") and time.monotonic() < deadline:
    time.sleep(0.05)
  assert run.events("run_end")[-1]["exit"] == 42, run.printed
  assert run.committed_steps()[-1] == run.last_step
