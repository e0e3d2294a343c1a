"""Some random fault histories behind a stand-in for Pathways. end_to_end/pathways_histories.py runs hundreds."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest


@pytest.mark.soak  # test_pathways_command has a kill and a hang behind the stand-in
@pytest.mark.timeout(900)
def test_a_history_behind_the_stand_in_loses_nothing():
  """Seed 3 has a hang, losses, returns and kills at random times on a fixed mesh."""
  command = [sys.executable, "-m", "end_to_end.pathways_histories", "--first", "3", "--count", "1"]
  environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
  done = subprocess.run(command, capture_output=True, text=True, timeout=800, env=environment)
  assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
  assert re.search(r"1 histories in \d+ s, all correct: \d{2} faults, [1-9]\d* recoveries", done.stdout), done.stdout
  for fault in ("slice_down in a step", "slice_down in a snapshot", "slice_down at a random time", "hang in a"):
    assert fault in done.stdout
