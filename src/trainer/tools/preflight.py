"""`python -m trainer.tools.preflight CONFIG.yml key=value ...`: prints what a run needs and costs, without running it.

With compile_topology=v5e-16 compile_topology_num_slices=3, preflight compiles the exact training step for TPUs that
this machine does not have; with compile_topology=h100-8 for the GPUs of a host, and several slices are several hosts.
Without these keys it compiles for the devices of this machine.

Preflight also compiles the step with one slice lost. It does so quickly, with little optimization, and compiles that
step with full optimization only if the quick program does not fit.

Exit codes: 0: the step fits. 1: it does not fit. 2: the input is wrong, or the compiler is not installed. 3: the
compiler refused the step for a reason other than memory.
"""

from __future__ import annotations

import argparse
import time

from trainer import cluster, commands
from trainer.config import load
from trainer.config.keys import preflight_options
from trainer.observe import screen


def main(argv: list[str] | None = None) -> int:
  """Prints the findings to stdout as soon as they are known, and returns the exit code."""
  return commands.main(commands.parser(__doc__), _run, argv, rest="arguments")


def _run(given: argparse.Namespace) -> int:
  started = time.monotonic()
  options, others = preflight_options(given.arguments)
  config = load(others, check_paths=False, repeats=False)
  cluster.check_environment()
  from trainer.preflight import compiling  # imports jax, so only after the arguments are checked

  return compiling.run(config, options, started)


if __name__ == "__main__":
  screen.command(main)
