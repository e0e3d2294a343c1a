"""`python -m trainer.tools.report RUN_DIR [...]`: writes report.html and loss.png of runs, finished or not."""

from __future__ import annotations

import argparse
import os

from trainer import commands
from trainer.observe import screen
from trainer.report import goodput, history, page


def main(argv: list[str] | None = None) -> int:
  parser = commands.parser(__doc__)
  parser.add_argument(
    "run_directory",
    nargs="+",
    type=os.path.expanduser,
    help="{base_output_directory}/{run_name}, local, gs:// or s3://",
  )
  return commands.main(parser, _report, argv)


def _report(options: argparse.Namespace) -> None:
  for directory in options.run_directory:
    run = history.load_with_steps(directory)
    print(page.write(run, goodput.compute(run)))


if __name__ == "__main__":
  screen.command(main)
