"""`python -m trainer.tools.report RUN_DIR [...]`: writes report.html and loss.png of runs, finished or not."""

from __future__ import annotations

import argparse
import os

from trainer.config.errors import ConfigError, tell_end
from trainer.config.option_types import real
from trainer.observe import screen
from trainer.report import goodput, history, page


def main(argv: list[str] | None = None) -> int:
  """Returns the exit code: 0, or 2 with one line on stderr if a directory is missing, unreadable or no run."""
  parser = argparse.ArgumentParser(prog="python -m trainer.tools.report", description=__doc__)
  parser.add_argument(
    "run_directory",
    nargs="+",
    type=os.path.expanduser,
    help="{base_output_directory}/{run_name}, local, gs:// or s3://",
  )
  parser.add_argument(
    "--chip-hour-price", type=real(0, 1e9), default=0.0, help="price of a chip for an hour: show what each event cost"
  )
  arguments = parser.parse_args(argv)
  try:
    for directory in arguments.run_directory:
      run = history.load_with_steps(directory)
      print(page.write(run, goodput.compute(run), arguments.chip_hour_price))
  except (ConfigError, OSError) as error:
    return tell_end(error)
  return 0


if __name__ == "__main__":
  screen.command(main)
