"""Runs several slices as processes of this machine, and keeps the run going when they die.

  python -m trainer.launch.local --slices 3 [--spares 1] [--processes-per-slice 1] CONFIG.yml key=value ...

Every slice is a process (or several) with its own JAX world. This process supervises them: when one is lost, the others
go on within a fraction of a second and lose no step; the lost one is started again and joins with the state of a living
one. The exit codes are the same as with `python -m trainer`.
"""

from __future__ import annotations

import argparse
import sys

from trainer.config import ConfigError, load
from trainer.launch.keys import refuse_other, require
from trainer.launch.supervisor import BAD_INPUT, Supervisor


def main(argv: list[str] | None = None) -> int:
  """Runs the command and returns its exit code."""
  parser = argparse.ArgumentParser(
    prog="python -m trainer.launch.local",
    description="Run several slices as processes of this machine.",
    epilog="All other arguments are those of `python -m trainer`.",
    allow_abbrev=False,
  )
  parser.add_argument("--slices", type=int, required=True, help="slices that compute, and shares of the batch")
  parser.add_argument("--spares", type=int, default=0, help="more slices, which wait until one is lost")
  parser.add_argument("--processes-per-slice", type=int, default=1, help="processes of one slice, joined by JAX")
  options, arguments = parser.parse_known_args(argv)
  try:
    for name in ("slices", "processes_per_slice"):
      require(getattr(options, name) >= 1, f"--{name.replace('_', '-')} {getattr(options, name)}", "at least 1")
    require(options.spares >= 0, f"--spares {options.spares}", "at least 0")
    ours = {"cluster": "multiprocess", "num_slices": str(options.slices)}
    arguments += refuse_other(arguments, "trainer.launch.local", ours)
    config = load(arguments)
    least = config.elastic.elastic_min_slice_count
    if least > options.slices:
      raise ConfigError(f"elastic_min_slice_count={least} is more than --slices {options.slices}.\nLower it.")
  except ConfigError as error:
    print(f"error: {error}", file=sys.stderr)
    return BAD_INPUT
  command = [sys.executable, "-m", "trainer", *arguments]
  return Supervisor(command, config, spares=options.spares, lanes=options.processes_per_slice).run()


if __name__ == "__main__":
  sys.exit(main())
