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

import argparse

from trainer import commands
from trainer.config.errors import require
from trainer.launch.manifest import gke_options, image_checks, job_checks, job_text
from trainer.launch.manifest.gke_plan import resolve
from trainer.observe import screen


def render(chosen: argparse.Namespace) -> str:
  """The text for these options. Raises ConfigError if they are wrong or do not fit together."""
  plan = resolve(chosen)
  require([*job_checks.problems(plan), *image_checks.problems(plan)])
  return job_text.render(plan)


def parser() -> argparse.ArgumentParser:
  parser = commands.parser(__doc__)
  gke_options.add_to(parser, job_text.TARGETS)
  return parser


def main(argv: list[str] | None = None) -> int:
  return commands.main(parser(), lambda chosen: print(render(chosen), end=""), argv)


if __name__ == "__main__":
  screen.command(main)
