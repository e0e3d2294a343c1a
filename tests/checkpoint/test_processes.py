"""Both tiers over four processes of one JAX world: losses, other numbers of processes, bytes read, SIGTERM."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from tests.support import toy_state
from tests.support.jax_processes import Processes

from trainer.checkpoint.tiers import Tiers
from trainer.world import SingleWorld

pytestmark = pytest.mark.timeout(600)  # seconds on a quiet machine, minutes on a busy one


# One world does all of this: starting four processes takes as long as most of the scenarios.
SCENARIOS = "losses,persistent,count_bytes,save_shared,preempted"


@pytest.mark.soak  # the longest of all; test_preemption.py has two processes
def test_four_processes(server, tmp_path):
  """Lost hosts and slices, the persistent tier, bytes read, worlds of other sizes, and SIGTERM to one process."""
  processes = Processes(server, SCENARIOS, tmp_path, 4)
  processes.wait_for_text(2, "step 5\n")
  processes.processes[2].send_signal(signal.SIGTERM)  # only to one process, as when a single host is reclaimed
  texts = processes.finish()
  check_bytes_read(texts)
  stops = [re.findall(r"stopped at (\d+), committed (\d+)", text) for text in texts]
  assert stops[0] and all(stop == stops[0] for stop in stops)
  assert stops[0][0][0] == stops[0][0][1]
  check_other_worlds(server, tmp_path / "save_shared")


def check_bytes_read(texts: list[str]) -> None:
  """With one replica that reads, the other replica's processes read almost nothing."""
  counts = {}
  for process, text in enumerate(texts):
    for single, count in re.findall(r"single=(\w+) read=(\d+)", text):
      counts[single, process] = int(count)
  size = 4 << 20
  everybody = [counts["False", process] for process in range(4)]
  one = [counts["True", process] for process in range(4)]
  assert sum(everybody) >= 2 * size
  assert size <= sum(one) <= 1.2 * size
  assert max(one[2:]) < 0.1 * size


def check_other_worlds(server, path: Path) -> None:
  """One process and two processes resume from the files of four."""
  cfg = toy_state.config(
    enable_emergency_checkpoint=True, local_checkpoint_directory=str(path / "shared"), local_checkpoint_period=1
  )
  tiers = Tiers(cfg, str(path / "run"), world=SingleWorld())  # this process: a world of one process with eight devices
  restored = tiers.restore_newest(toy_state.abstract(toy_state.values(), toy_state.mesh(4, 2)))
  assert (restored.step, restored.tier) == (3, "emergency")
  toy_state.assert_same_bits(restored.state, toy_state.values(3))
  Processes(server, "resume", path, 2).finish()
