"""The awk program of the elastic training guide of google/pathways-utils (docs, Apache License 2.0), word for word.

It reads a training log. Our log must work with it unchanged.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

SCRIPT = r"""
  /step=/ && /elastic_manager\.elastic_down_event_count=/ {
    split($0, fields, " ")
    step = ""
    good_slice_count = ""
    for (i in fields) {
      split(fields[i], kv, "=")
      if (kv[1] == "step") {
        step = kv[2]
      } else if (kv[1] == "elastic_manager.good_slice_count") {
        good_slice_count = kv[2]
      }
    }
    if (prev_good_slice_count != "" && prev_good_slice_count != good_slice_count) {
      print "Step: " step ", Old Slice Count: " prev_good_slice_count ", New Slice Count: " good_slice_count
    }
    prev_step = step
    prev_good_slice_count = good_slice_count
  }
"""


def slice_count_changes(log: Path) -> list[str]:
  """The lines that the guide's script prints for a log file: one per change of the number of slices."""
  done = subprocess.run(["awk", SCRIPT, str(log)], capture_output=True, text=True, timeout=60, check=True)
  return done.stdout.splitlines()
