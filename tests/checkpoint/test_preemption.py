"""Two processes of a JAX world: rows are counted once, SIGTERM stops both, and what a second signal does."""

from __future__ import annotations

import re
import signal
import time

import pytest
from tests.support.jax_processes import Processes


@pytest.mark.timeout(600)
def test_rows_are_counted_once_and_sigterm_to_one_of_two_processes_stops_both_at_the_same_step(server, tmp_path):
  """Also rows that several of them hold, because the tensor axis spans processes."""
  processes = Processes(server, "tallies,preempted", tmp_path, 2)
  processes.wait_for_text(1, "step 5\n")
  processes.processes[1].send_signal(signal.SIGTERM)
  stops = [re.findall(r"stopped at (\d+), committed (\d+)", text) for text in processes.finish()]
  assert len(stops[0]) == 1 and stops[0] == stops[1]
  assert stops[0][0][0] == stops[0][0][1]


@pytest.mark.timeout(600)
def test_a_second_signal_ends_one_of_several_at_once(server, tmp_path):
  processes = Processes(server, "ignoring_preemption", tmp_path, 2)
  try:
    for line in ("ready", "asked"):
      processes.wait_for_text(1, line)
      processes.processes[1].send_signal(signal.SIGTERM)
      time.sleep(1.3)
    assert processes.processes[1].wait(30) == 143
  finally:
    processes.kill()
