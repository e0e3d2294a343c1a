"""`python -m trainer` whose steps are slow, for endless runs of torchrun."""

from __future__ import annotations

import runpy

from tests.support.forked_runs import slow_down

if __name__ == "__main__":
  slow_down()
  runpy.run_module("trainer", run_name="__main__", alter_sys=True)
