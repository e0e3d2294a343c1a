"""`python -m trainer.tools.verify RUN_DIR`: checks what a run computed, with the receipt that it has written.

The receipt (receipt.jsonl) is checked line by line, and the checkpoints and metrics.jsonl are compared with it: this
needs no device. --replay computes steps again, on this machine or on other slices (key=value). --against finds the
first step at which two runs differ. docs/trust.md says what this proves.

Exit code 0: all is equal; 1: something differs; 2: wrong input.
"""

from __future__ import annotations

import argparse

from trainer import commands
from trainer.config.errors import ConfigError
from trainer.observe import screen
from trainer.trust.comparison import against, verify


def main(argv: list[str] | None = None) -> int:
  parser = commands.parser(__doc__)
  parser.add_argument("run_directory", metavar="RUN_DIR", help="{base_output_directory}/{run_name}")
  parser.add_argument("keys", nargs="*", metavar="key=value", help="of the replay, such as num_slices=1")
  which = parser.add_mutually_exclusive_group()
  which.add_argument("--replay", metavar="FROM:TO", help="compute these steps again, from the checkpoint before them")
  which.add_argument("--against", metavar="OTHER_RUN", help="find the first step at which the two receipts differ")
  return commands.main(parser, _verify, argv)


def _verify(options: argparse.Namespace) -> int:
  if options.keys and not options.replay:
    raise ConfigError(f"{options.keys[0]}: keys belong to a replay.\nAdd --replay FROM:TO.")
  run = options.run_directory
  problems = against(run, options.against) if options.against else verify(run, options.replay or "", options.keys)
  for problem in problems:
    print(problem)
  return 1 if problems else 0


if __name__ == "__main__":
  screen.command(main)
