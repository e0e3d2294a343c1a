"""Runs slices of a run on this host, for a supervisor on another host (trainer.launch.local --listen).

  python -m trainer.launch.agent --supervisor HOST:PORT [--slices 1] [--host ADDRESS] [--token-file FILE]

The supervisor says what to run, and decides about restarts. The agent starts the processes, reports at once when one
ends, and kills processes that hang. If the connection to the supervisor ends, the processes save and end, and the agent
waits for a supervisor at the same address. If it cannot reach any within --wait-seconds, it ends with exit code 42: a
scheduler may start it again. If the agent dies, its processes leave in good order, because nobody could restart or kill
them any more.
"""

from __future__ import annotations

import argparse
import sys

from trainer import commands
from worlds.interruptions import run_launcher


def main(argv: list[str] | None = None) -> int:
  """Runs the command and returns its exit code. Imports here and not above, so that a signal finds its handler."""
  from trainer.config.option_types import real, whole
  from trainer.observe import screen

  screen.protect()
  parser = commands.parser(__doc__)
  parser.add_argument("--supervisor", metavar="HOST:PORT", required=True, help="what trainer.launch.local listens on")
  parser.add_argument("--slices", type=whole(1), default=1, help="slices of this host (default: 1)")
  parser.add_argument("--host", default="", help="this host's address for the others (default: as in the connection)")
  parser.add_argument("--token-file", default="", help="file with the token (default: variable TRAINER_TOKEN)")
  parser.add_argument("--wait-seconds", type=real(0, 1e9), default=300.0, help="longest wait for the supervisor (300)")
  return commands.main(parser, _run, argv)


def _run(options: argparse.Namespace) -> int:
  from trainer.cluster import job_token
  from trainer.config.errors import ConfigError
  from trainer.launch.launcher_keys import program
  from worlds import addresses
  from worlds.exit_codes import PREEMPTED
  from worlds.host_agent import Agent
  from worlds.membership.wire import Refused

  try:
    addresses.split(options.supervisor)
  except ValueError as error:
    raise ConfigError(f"--supervisor {options.supervisor}: {error}.") from error
  if options.host and not options.host.strip():
    raise ConfigError(f"--host {options.host!r}: is no address.\nGive the address of this host, or remove --host.")
  agent = Agent(
    program(),
    options.supervisor,
    job_token(options.token_file),
    slices=options.slices,
    host=options.host,
    wait_seconds=options.wait_seconds,
  )
  try:
    return agent.run()
  except (TimeoutError, Refused) as error:
    text = (
      f"--supervisor {options.supervisor}: {error}.\nStart `python -m trainer.launch.local --listen HOST:PORT` there, "
      "with the same token, and let this host reach the port."
    )
    if isinstance(error, Refused):
      raise ConfigError(text) from error
    # The supervisor may come later, on a host that was lost: the scheduler restarts this command after PREEMPTED.
    print(f"error: {text}", file=sys.stderr)
    return PREEMPTED


if __name__ == "__main__":
  run_launcher(main)
