"""hf_export_period: each due step becomes a Hugging Face folder once, whatever fails, and the run goes on."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from tests.support import command
from tests.support.command_runs import KEYS
from tests.support.process_runs import ProcessRun

from trainer.tools import export_hf
from worlds.place import MEMBER

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore:Sharding info not provided")]
EXPORTS = [*KEYS, "checkpoint_period=2", "hf_export_period=4", "steps=6"]


@pytest.fixture
def make(server, compiled, tmp_path):
  return lambda *keys: command.Run(tmp_path / "a", [*EXPORTS, compiled, *keys], server.start)


def exported(run):
  return [event["step"] for event in run.events("hf_exported")]


def assert_is_the_export_of_the_tool(run, step, folder):
  assert export_hf.main([f"{run.directory}@{step}", str(folder)]) == 0
  found, expected = (
    {path.name: path.read_bytes() for path in p.iterdir()} for p in (run.directory / f"hf/{step}", folder)
  )
  assert found == expected and "trainer_export.json" in found


def children(pid):
  """The processes that the process `pid` has started and that live."""
  found = []
  for path in Path("/proc").glob("[0-9]*"):
    try:
      if int((path / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
        found.append(int(path.name))
    except OSError:
      continue
  return [child for child in found if command.is_running(child)]


def block(run):
  """Lets every export of the run hang after it has written the weights: it reads a pipe into which nobody writes."""
  (run.directory / "tokenizer").mkdir(parents=True, exist_ok=True)
  os.mkfifo(run.directory / "tokenizer" / "chat_template.jinja")


def unblock(run):
  (run.directory / "tokenizer" / "chat_template.jinja").unlink()


@pytest.mark.slow
def test_exports_are_those_of_the_tool_and_keep_their_checkpoint(make, tmp_path):
  """Also after one has failed: it is one warning, and the command with more steps makes it up."""
  run = make("max_num_checkpoints_to_keep=1")
  run.directory.mkdir(parents=True)
  (run.directory / "hf").write_text("no folder\n")
  assert run.finish("steps=4") == 0, run.printed
  assert not exported(run)
  assert [event["step"] for event in run.events("hf_export_failed")] == [4]
  assert run.printed.count(f"warning: no export of step 4: {run.directory}/hf/4: cannot be written") == 1
  (run.directory / "hf").unlink()
  assert run.finish() == 0, run.printed
  assert exported(run) == [4, 6] and sorted(os.listdir(run.directory / "hf")) == ["4", "6"]
  assert f"Exported step 6 to {run.directory}/hf/6" in run.printed
  assert run.committed_steps() == [4, 6]  # without exports, only 6 would be left
  for step in (4, 6):
    assert_is_the_export_of_the_tool(run, step, tmp_path / str(step))
  assert run.finish() == 0, run.printed
  assert exported(run) == [4, 6]


@pytest.mark.soak
def test_an_export_that_is_interrupted_again_and_again_is_made_up(make, tmp_path):
  run = make()
  block(run)
  weights = run.directory / "hf" / "4.unfinished" / "model.safetensors"
  for starts, (number, code) in enumerate({signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: 42}.items(), 1):
    process = run.start()
    awaited = lambda starts=starts: weights.exists() and run.printed.count("hf are awaited") == starts
    assert command.wait_until(process, awaited), run.printed
    (export,) = children(process.pid)
    began = time.monotonic()
    process.send_signal(number)
    assert process.wait(60) == code
    assert time.monotonic() - began < 10
    while command.is_running(export):  # until the timeout of the test
      time.sleep(0.05)
  assert not exported(run) and os.listdir(run.directory / "hf") == ["4.unfinished"]
  unblock(run)
  assert run.finish() == 0, run.printed
  assert exported(run) == [4, 6] and sorted(os.listdir(run.directory / "hf")) == ["4", "6"]
  assert "warning" not in run.printed
  assert_is_the_export_of_the_tool(run, 4, tmp_path / "4")


@pytest.mark.soak  # the first test makes exports up; tests/launch/test_local.py loses primaries
def test_the_next_primary_makes_up_the_exports_of_the_one_that_is_killed(server, compiled, tmp_path):
  keys = ["checkpoint_period=4", "hf_export_period=4", "steps=8", compiled]
  run = ProcessRun(tmp_path / "a", keys, slices=2, server=server)
  block(run)
  with run.launched() as supervisor:
    run.wait_for(lambda: "hf are awaited" in run.printed, supervisor)
    unblock(run)
    (primary,) = [pid for pid, env in run.processes().items() if MEMBER in env and children(pid)]
    run.send(primary, signal.SIGKILL)
    assert run.wait(supervisor) == 0, run.printed
  assert len(run.events("primary")) == 1
  assert exported(run) == [4, 8] and sorted(os.listdir(run.directory / "hf")) == ["4", "8"]
