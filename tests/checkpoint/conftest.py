"""Fixtures for tests of the real command."""

from __future__ import annotations

import signal

import pytest
from end_to_end.command import Run
from tests.support.command_runs import KEYS


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
