"""Both tiers over four processes of one JAX world: losses, other numbers of processes, bytes read, SIGTERM."""

from __future__ import annotations

import re
import signal

import pytest
from tests.support.jax_processes import Processes

pytestmark = pytest.mark.timeout(600)  # seconds on a quiet machine, minutes on a busy one


# One world does all of this: starting four processes takes as long as most of the scenarios.
SCENARIOS = "losses,persistent,count_bytes,preempted"


@pytest.mark.soak  # the longest of all; test_preemption.py has two processes
def test_four_processes(server, tmp_path):
  """Lost hosts and slices, the persistent tier, bytes read, and SIGTERM to one process."""
  processes = Processes(server, SCENARIOS, tmp_path, 4)
  processes.wait_for_text(2, "step 5\n")
  processes.processes[2].send_signal(signal.SIGTERM)  # only to one process, as when a single host is reclaimed
  texts = processes.finish()
  check_bytes_read(texts)
  stops = [re.findall(r"stopped at (\d+), committed (\d+)", text) for text in texts]
  assert stops[0] and all(stop == stops[0] for stop in stops)
  assert stops[0][0][0] == stops[0][0][1]


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
