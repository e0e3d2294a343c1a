"""Sends a command to a running Pathways stand-in.

python -m pathways_standin.control [--port 29000 | --unix PATH] COMMAND ...
"""

from __future__ import annotations

import argparse
import json
import sys

from pathways_standin import process
from pathways_standin.arguments import COMMANDS, add_address, address


def main(argv: list[str] | None = None) -> int:
  """Runs the command and returns its exit code: 0, or 2 if the command is wrong or no server answers."""
  parser = argparse.ArgumentParser(
    prog="python -m pathways_standin.control",
    description="Send a command to a running Pathways stand-in.",
    epilog=f"commands:\n{COMMANDS}",
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  add_address(parser)
  parser.add_argument("command", nargs=argparse.REMAINDER, help="see below")
  options = parser.parse_args(argv)
  try:
    report = process.send(process.control_path(address(options)), options.command)
  except process.StandinError as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  print(json.dumps(report, indent=2))
  return 0


if __name__ == "__main__":
  sys.exit(main())
