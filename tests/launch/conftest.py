"""What the tests of launchers share."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.torchrun_runs import OneWorker
from tests.support.two_hosts import KEYS as TWO_HOSTS

STEPS = 80
ONE_WORLD = (f"steps={STEPS}", f"checkpoint_period={STEPS // 2}", "eval_interval=15", "eval_steps=2")
KEYS = (*ONE_WORLD, "shares_per_slice=2")  # shares of one row
LANES_STEPS = 20
# Two slices of two devices; the tests add processes and faults. The only checkpoint is written after the last step.
LANES = (*TWO_HOSTS, f"steps={LANES_STEPS}", f"checkpoint_period={LANES_STEPS}")


@pytest.fixture(scope="session")
def undisturbed(shared: Path, server, once) -> OneWorker:
  """A run of KEYS in one process, which computes the shares of three slices. The first worker of pytest that needs it
  runs it for all."""
  run = OneWorker(shared / "undisturbed", [*KEYS, f"jax_cache_dir={shared / 'compiled'}"], server=server)

  def launch(_: Path) -> None:
    with run.launched() as worker:
      assert run.wait(worker) == 0, run.tail()

  once("undisturbed", launch)
  return run


@pytest.fixture(scope="session")
def compiled(compiled: str, undisturbed: OneWorker) -> str:
  """The key of the shared cache, with the programs of `undisturbed`: they are the same for any number of slices, and
  slices that start at the same time would each compile them."""
  return compiled
