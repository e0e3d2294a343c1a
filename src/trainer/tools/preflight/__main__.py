"""`python -m trainer.tools.preflight CONFIG.yml key=value ...`: what the run will need and cost, without running it.

With compile_topology=v5e-16 compile_topology_num_slices=3 the exact training step is compiled for TPUs that are not
there; without it, for the devices of this machine. preflight.search=true also looks for the fastest remat policy and
batch size that fit. The step of one slice less is compiled quickly, with little optimization, unless it fits only as
it runs; preflight.degraded=full always compiles it as it runs, preflight.degraded=none leaves it out.
Exit code 0: it fits; 1: it does not; 2: the input is wrong or the compiler is not installed; 3: the compiler refused
the step for another reason than memory.
"""

from __future__ import annotations

import sys
import time

from trainer.config import ConfigError, load


def main(argv: list[str] | None = None) -> int:
  """Returns the exit code; the findings go to stdout as soon as they are known."""
  started = time.monotonic()
  arguments = sys.argv[1:] if argv is None else argv
  if not arguments or {"--help", "-h"} & set(arguments):
    print(__doc__)
    return 0 if arguments else 2
  try:
    config = load(arguments, check_paths=False)
    from trainer.tools.preflight import run  # jax is imported here, when the arguments are known to be good

    return run.run(config, started)
  except (ConfigError, ValueError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
  sys.exit(main())
