"""The preflight command for the machine that it runs on. It compiles for a CPU, so one Python is enough for it."""

from __future__ import annotations

import re

from tests.tools.preflight_command import AUTO, command


def test_for_this_machine():
  done = command("num_slices=3", "steps=10", "attention=dot_product")
  assert done.returncode == 0, done.stderr
  assert "2 of 3 |                      2 |   25.0% |   50.0%" in done.stdout
  assert "The step on 3 of 3 slices" in done.stdout and "The step on 2 of 3 slices" in done.stdout
  assert "Ramdisk per host" in done.stdout
  assert "Measured per device of this machine: matmuls" in done.stdout
  assert done.stdout.count("Roofline on this CPU: compute") == 2 and done.stdout.count(": fits") == 2
  assert done.stdout.count("Step time on this CPU: ") == 2
  assert done.stdout.count("Missing in these times: DCN: the bandwidth is unknown") == 2


def test_the_step_with_one_slice_lost_can_be_skipped():
  done = command("num_slices=3", "steps=10", "attention=dot_product", "preflight.degraded=none", *AUTO)
  assert done.returncode == 0, done.stderr
  assert "remat_policy=auto: minimal_with_context, the first policy that fits, in the order for cpus" in done.stdout
  assert re.search(r"\n  minimal_with_context \| no estimate \| no estimate \| [\d.]+ MB\n", done.stdout), done.stdout
  assert "The step on 3 of 3 slices" in done.stdout and "The step on 2 of 3 slices" not in done.stdout
  assert "2 of 3 |                      2 |   25.0% |   50.0%" in done.stdout
