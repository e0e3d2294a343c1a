"""Both tiers over four processes of one JAX world: lost hosts, lost slices, other numbers of processes, bytes read."""

from __future__ import annotations

import re

import pytest
from tests.support import toy_state
from tests.support.jax_processes import Processes

from trainer.checkpoint import Tiers
from trainer.world import SingleWorld

pytestmark = pytest.mark.timeout(600)  # seconds on a quiet machine, minutes on a busy one


def test_lost_hosts_and_slices(server, tmp_path):
  Processes(server, "losses", tmp_path, 4).finish()


def test_persistent_tier(server, tmp_path):
  Processes(server, "persistent", tmp_path, 4).finish()


def test_one_replica_reads(server, tmp_path):
  counts = {}
  for process, text in enumerate(Processes(server, "count_bytes", tmp_path, 4).finish()):
    for single, count in re.findall(r"single=(\w+) read=(\d+)", text):
      counts[single, process] = int(count)
  size = 4 << 20
  everybody = [counts["False", process] for process in range(4)]
  one = [counts["True", process] for process in range(4)]
  assert sum(everybody) >= 2 * size
  assert size <= sum(one) <= 1.2 * size
  assert max(one[2:]) < 0.1 * size


def test_worlds_of_other_sizes_resume(server, tmp_path):
  Processes(server, "save_shared", tmp_path, 4).finish()
  cfg = toy_state.config(
    enable_emergency_checkpoint=True, local_checkpoint_directory=str(tmp_path / "shared"), local_checkpoint_period=1
  )
  tiers = Tiers(
    cfg, str(tmp_path / "run"), world=SingleWorld()
  )  # this process is a world of one process with eight devices
  restored = tiers.restore_newest(toy_state.abstract(toy_state.values(), toy_state.mesh(4, 2)))
  assert (restored.step, restored.tier) == (3, "emergency")
  toy_state.assert_same_bits(restored.state, toy_state.values(3))
  Processes(server, "resume", tmp_path, 2).finish()
