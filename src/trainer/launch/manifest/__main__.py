"""`python -m trainer.launch.manifest TARGET CONFIG.yml key=value ... --image IMAGE --tpu-type TYPE [--option value]`.

Prints the command or the YAML that starts this run on GKE. It changes nothing and needs no cluster. TARGET is one of:

  gcluster     a `gcluster job submit` command (Cluster Toolkit)
  xpk          an `xpk workload create` or `xpk workload create-pathways` command
  jobset       a JobSet, for `kubectl apply -f -`
  pathwaysjob  a PathwaysJob, for `kubectl apply -f -`

With enable_single_controller=true the run is behind Pathways: one controller on a CPU node drives all slices. Otherwise
every TPU host has a process. Lines that start with # are comments: shells and kubectl ignore them.

Exit codes: 0: printed. 2: the configuration, an option or their combination is wrong; nothing is printed to stdout.
"""

from __future__ import annotations

import sys

from trainer.config import ConfigError
from trainer.config.errors import require
from trainer.launch.manifest import checks, contents, options, text
from trainer.launch.manifest.plan import resolve
from trainer.observe import screen


def render(arguments: list[str]) -> str:
  """The text for these arguments. Raises ConfigError if they are wrong or do not fit together."""
  plan = resolve(options.parse(arguments, text.TARGETS))
  require([*checks.problems(plan), *contents.problems(plan)])
  return text.render(plan)


def main(argv: list[str] | None = None) -> int:
  """Prints the text and returns the exit code."""
  arguments = sys.argv[1:] if argv is None else argv
  if not arguments or {"--help", "-h"} & set(arguments):
    print(__doc__)
    print(options.describe())
    return 0 if arguments else 2
  try:
    print(render(arguments), end="")
  except ConfigError as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  return 0


if __name__ == "__main__":
  screen.command(main)
