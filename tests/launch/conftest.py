"""What the tests of launchers share."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from tests.support.torchrun_runs import OneWorker
from tests.support.two_hosts import KEYS as LANES  # two slices of two devices; the tests add processes and faults
from tests.support.two_hosts import STEPS as LANES_STEPS


@pytest.fixture(scope="session")
def once(shared) -> Callable[[str], AbstractContextManager[None]]:
  """once(name): a block that one worker of pytest executes at a time."""

  @contextmanager
  def block(name: str) -> Iterator[None]:
    with (shared / f"{name}.lock").open("w") as file:
      fcntl.flock(file, fcntl.LOCK_EX)
      yield

  return block


@pytest.fixture(scope="session")
def one_worker(shared: Path, compiled: str, server, once) -> OneWorker:
  """A run of LANES in one process, which computes all. The first worker of pytest that needs it runs it for all."""
  run = OneWorker(shared / "one-worker", [*LANES, compiled], slices=2, server=server)
  with once("one-worker"):
    if LANES_STEPS not in run.committed_steps():
      with run.launched() as worker:
        assert run.wait(worker) == 0, run.tail()
  return run
