"""Fixtures for tests of the real command."""

from __future__ import annotations

import signal

import pytest
from tests.support.command import Run
from tests.support.command_runs import KEYS


@pytest.fixture(scope="session")
def start(server, compiled):
  """Starts runs for commands of end_to_end. Their own caches and schedules are replaced, to share compiled programs."""

  def with_shared_programs(argv, changes, log):
    keys = [key for key in argv if not key.startswith("jax_cache_dir=")]
    return server.start([*keys, compiled, "learning_rate_schedule_steps=1000"], changes, log)

  return with_shared_programs


@pytest.fixture
def make(server, compiled, tmp_path):
  """make(key=value, ...) returns a run. Processes that are still alive after the test are killed."""
  processes = []

  def start(argv, changes, log):
    processes.append(server.start(argv, changes, log))
    return processes[-1]

  yield lambda *keys: Run(tmp_path / "a", [*KEYS, compiled, *keys], start)
  for process in processes:
    if process.poll() is None:
      process.send_signal(signal.SIGKILL)
      process.wait(60)
