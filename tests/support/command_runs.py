"""Runs of the real command with a tiny model, for tests that start and stop it many times."""

from __future__ import annotations

from pathlib import Path

from tests.support import command
from tests.support.command import Process, Run

ENDLESS = 10**6  # steps
# One device and few arrays, so that a run starts and stops quickly. A fixed schedule and the vocabulary of bytes, so
# that runs of any length, also on text, share one compiled program.
KEYS = (
  "dataset_type=synthetic vocab_size=258 opt_type=sgd num_slices=1 checkpoint_period=3 "
  "learning_rate_schedule_steps=1000 z_loss_multiplier=0.001"
).split()


def start_and_train(run: Run, step: int, *keys: str, **changes: str) -> Process:
  """Starts a process of the run and returns it once it has done `step` steps."""
  process = run.start(*keys, **changes)
  assert command.wait_until(process, lambda: run.last_step >= step), run.printed[-4000:]
  return process


def write_text(folder: Path, lines: int = 4000) -> list[str]:
  """Writes a corpus into `folder` and returns the keys of a run that trains on it."""
  (folder / "text").mkdir(parents=True)
  (folder / "text" / "a.txt").write_text("".join(f"{i} lines are enough to train on\n" for i in range(lines)))
  return ["dataset_type=text", f"dataset_path={folder / 'text'}", f"dataset_cache_directory={folder / 'tokens'}"]


def assert_stopped(run: Run, process: Process) -> int:
  """Waits until the process has stopped on SIGTERM, with everything committed, and returns its last step."""
  assert process.wait(240) == 42, run.printed[-4000:]
  assert run.events("run_end")[-1]["exit"] == 42
  assert "SIGTERM received" in run.printed
  assert run.events("preemption")[-1]["signal"] == "SIGTERM"
  assert run.committed_steps()[-1] == run.last_step
  return run.last_step
