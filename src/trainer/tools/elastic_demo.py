"""Losing a slice loses nothing.

  python -m trainer.tools.elastic_demo [--pathways] [CONFIG.yml] [key=value ...]

Runs configs/elastic_demo.yml three times. One run continues with the remaining slices and grows again when the lost
slice returns. One run keeps a fixed mesh and waits for the replacement. One run has no faults. Prints how well their
losses agree. Exits with 1 if they do not.

With --pathways the two runs with faults use a stand-in for Pathways, with as many slices and devices, and JAX's real
proxy client. The run without faults has simulated slices.
"""

from __future__ import annotations

import argparse
import math
import sys
import time

from trainer import commands
from trainer.config import ConfigError, load
from trainer.config.keys import is_answered
from trainer.observe import screen
from trainer.observe.metrics import read_losses
from trainer.process.child import run_child

TOLERANCE = 1e-5  # relative; with fewer slices, float32 sums are computed in another order
_CONFIG = "configs/elastic_demo.yml"
_SCENARIOS = {
  "degrade": ("a slice dies and returns; training continues on the remaining slices", ()),
  "fixed_mesh": (
    "a slice dies; training waits for its replacement",
    ("elastic_min_slice_count=-1", "fault_injection=slice_down@30:2", "enable_report=false"),
  ),
  "undisturbed": ("no faults", ("elastic_min_slice_count=-1", "fault_injection=", "enable_report=false")),
}


def main(argv: list[str] | None = None) -> int:
  parser = commands.parser(__doc__)
  parser.add_argument("--pathways", action="store_true")
  return commands.main(parser, _run, argv, rest="arguments")


def _run(options: argparse.Namespace) -> int:
  arguments, pathways = options.arguments, options.pathways
  if unknown := [
    argument for argument in arguments[:1] if argument.startswith("-") and not is_answered(argument.lstrip("-"))
  ]:
    raise ConfigError(f"{unknown[0]}: is no option. The only option is --pathways.")
  if not arguments or "=" in arguments[0]:
    arguments = [_CONFIG, *arguments]
  config = load(arguments, repeats=False)
  if 0 < config.cluster.num_slices < 3:
    raise ConfigError(f"num_slices={config.cluster.num_slices}: the demo loses slice 2. Use at least 3.")
  # A new folder each time, because runs in an existing folder would resume and find nothing to do.
  directory = f"{config.run_directory}/{time.strftime('%Y%m%d-%H%M%S')}"
  for name, (story, changes) in _SCENARIOS.items():
    of_run = [*changes, f"base_output_directory={directory}", f"run_name={name}"]
    if pathways and name != "undisturbed":
      slices, devices = max(config.cluster.num_slices, 1), max(config.cluster.devices_per_slice, 1)
      of_run += ["cluster=pathways", f"cluster_standin={slices}x{devices}"]
    keys = [argument.partition("=")[0] for argument in of_run]
    name_of = lambda argument: argument.partition("=")[0].lstrip("-").replace("-", "_")
    others = [argument for argument in arguments if "=" not in argument or name_of(argument) not in keys]
    command = ["python", "-m", "trainer", *others, *of_run]
    print(f"\n=== {name}: {story}\n{' '.join(command)}", flush=True)
    code = run_child([sys.executable, *command[1:]])
    if code != 0:
      return code
  return _compare(directory)


def _compare(directory: str) -> int:
  degrade, fixed, undisturbed = (read_losses(f"{directory}/{name}") for name in _SCENARIOS)
  agree = all(_gap(losses, undisturbed) <= limit for losses, limit in ((degrade, TOLERANCE), (fixed, 0)))
  print(
    f"\n=== losses of {len(undisturbed)} steps against the undisturbed run's: largest relative difference\n"
    f"degrade:    {_gap(degrade, undisturbed):.1e} (allowed: {TOLERANCE:g})\n"
    f"fixed_mesh: {_gap(fixed, undisturbed):.1e} (must be 0)\n"
    f"{'They agree.' if agree else 'THEY DO NOT AGREE.'}"
  )
  return 0 if agree else 1


def _gap(ours: dict[int, float], theirs: dict[int, float]) -> float:
  """The largest relative difference; infinite if one run lacks a step or a loss is not finite."""
  gaps = [abs(ours.get(step, math.inf) - loss) / loss for step, loss in theirs.items()]
  return max(gaps, default=math.inf) if all(map(math.isfinite, gaps)) else math.inf


if __name__ == "__main__":
  screen.command(main)
