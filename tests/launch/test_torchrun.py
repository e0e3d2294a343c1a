"""Slices that the real torchrun starts: killed, restarted in groups of other sizes, and compared. Needs torch."""

from __future__ import annotations

import importlib.util
import os
import signal

import pytest
from tests.support.command import differences
from tests.support.forked_runs import ENDLESS
from tests.support.seeds import few
from tests.support.torchrun_runs import OneWorker, TorchrunRun

pytestmark = [
  pytest.mark.oldest,
  pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed"),
]
SLOW = 240  # seconds: every start of an agent imports torch


@pytest.mark.timeout(600)
@pytest.mark.parametrize("nodes", few([2], [2, 3]))
def test_losses_and_groups_of_every_size_change_nothing(shared, server, tmp_path, nodes):
  """A node joins the others, rank 0 is killed, and a node is lost with its agent. With three nodes, rank 0 is killed
  once more, and a group of two starts.

  Oracle: one worker. The first group of two nodes is one worker, which compiles for all.
  """
  keys = [f"jax_cache_dir={shared / 'compiled'}", "eval_steps=0"]
  run = TorchrunRun(tmp_path / "run", [*keys, ENDLESS], slices=nodes)
  with run.nodes(nodes - 1) as agents:

    def trains(size: int) -> None:
      """Returns when a group of this size has trained."""
      run.wait_for(lambda: run.group() == [size] * size, agents[0], SLOW)
      step = run.last_step
      run.wait_for(lambda: run.last_step >= step + 5, agents[0], SLOW)

    trains(nodes - 1)
    agents.append(run.launch())
    trains(nodes)
    os.kill(run.workers()[0], signal.SIGKILL)  # the supervisor ends with it
    trains(nodes)
    last = run.workers()[nodes - 1]
    agents[-1].send_signal(signal.SIGKILL)  # its worker leaves in good order, and nobody restarts the others
    run.wait_for(lambda: last not in run.processes(), agents[0])
    assert run.group() == [nodes] * (nodes - 1)
    step = run.last_step
    run.wait_for(lambda: run.last_step >= step + 5, agents[0])
    if nodes > 2:  # somebody is left who saves
      os.kill(run.workers()[0], signal.SIGKILL)
      trains(nodes - 1)
    for agent in agents[:-1]:
      agent.send_signal(signal.SIGTERM)
    run.wait_for_processes(SLOW)
  last = run.last_step
  assert run.steps() == list(range(1, last + 1)) and run.committed_steps()[-1] == last, run.tail()

  single = OneWorker(tmp_path / "single", [*keys, f"steps={last}"], slices=nodes, server=server)
  with single.launched() as worker:
    assert single.wait(worker) == 0, single.tail()
  assert {record["slices"] for record in single.records("metrics") if "loss" in record} == {1}
  assert differences(run, single, last) == []
