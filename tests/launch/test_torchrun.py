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
@pytest.mark.parametrize("joins", few([False], [False, True]))
def test_losses_and_groups_of_every_size_change_nothing(compiled, server, tmp_path, joins):
  """A node loses its agent, rank 0 is killed, and a group of two starts. joins: then a third node, and a third group.

  Oracle: one worker.
  """
  keys = [compiled, "eval_steps=0"]
  run = TorchrunRun(tmp_path / "run", [*keys, ENDLESS])
  with run.nodes(3) as agents:

    def trains(size: int) -> None:
      """Returns when a group of this size has trained."""
      run.wait_for(lambda: run.group() == [size] * size, agents[0], SLOW)
      step = run.last_step
      run.wait_for(lambda: run.last_step >= step + 5, agents[0], SLOW)

    trains(3)
    third = run.workers()[2]
    agents[2].send_signal(signal.SIGKILL)  # its worker leaves in good order, and nobody restarts the others
    run.wait_for(lambda: third not in run.processes(), agents[0])
    assert run.group() == [3, 3]
    step = run.last_step
    run.wait_for(lambda: run.last_step >= step + 5, agents[0])
    os.kill(run.workers()[0], signal.SIGKILL)  # the supervisor ends with it
    trains(2)
    if joins:
      agents.append(run.launch())
      trains(3)
    for agent in [*agents[:2], *agents[3:]]:
      agent.send_signal(signal.SIGTERM)
    run.wait_for_processes(SLOW)
  last = run.last_step
  assert run.steps() == list(range(1, last + 1)) and run.committed_steps()[-1] == last, run.tail()

  single = OneWorker(tmp_path / "single", [*keys, f"steps={last}"], slices=3, server=server)
  with single.launched() as worker:
    assert single.wait(worker) == 0, single.tail()
  assert {record["slices"] for record in single.records("metrics") if "loss" in record} == {1}
  assert differences(run, single, last) == []
