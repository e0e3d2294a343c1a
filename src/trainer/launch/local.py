"""Runs several slices as processes of this machine, and keeps the run going when they die.

  python -m trainer.launch.local --slices 3 [--spares 1] [--processes-per-slice 1] CONFIG.yml key=value ...

With --listen HOST:PORT --local-slices N, agents on other hosts (trainer.launch.agent) run the other slices.

Every slice is a process (or several) with its own JAX world. This process supervises them: when one is lost, the others
go on within a fraction of a second and lose no step; the lost one is started again and joins with the state of a living
one. All other arguments and the exit codes are as for `python -m trainer`.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from trainer import commands
from worlds.interruptions import run_launcher

if TYPE_CHECKING:
  from worlds.supervisor import Where


def main(argv: list[str] | None = None) -> int:
  """Runs the command and returns its exit code. Imports here and not above, so that a signal finds its handler."""
  from trainer.config.option_types import whole
  from trainer.observe import screen

  screen.protect()
  parser = commands.parser(__doc__)
  parser.add_argument("--slices", type=whole(1), required=True, help="slices that compute")
  parser.add_argument("--spares", type=whole(0, 1024), default=0, help="more slices, which wait until one is lost")
  parser.add_argument("--processes-per-slice", type=whole(1), default=1, help="processes of one slice, joined by JAX")
  parser.add_argument("--listen", metavar="HOST:PORT", help="accept agents of other hosts at this address")
  parser.add_argument(
    "--local-slices", type=whole(0), help="slices of this host, if agents run the others or none does (default: all)"
  )
  parser.add_argument("--advertise", metavar="HOST", help="the address for other hosts (default: as in --listen)")
  parser.add_argument("--token-file", default="", help="file with the token (default: variable TRAINER_TOKEN)")
  return commands.main(parser, _run, argv, rest="arguments")


def _run(options: argparse.Namespace) -> int:
  from trainer.cluster.launched import check, exchange_host, run_rules
  from trainer.config import ConfigError, shares, validate
  from trainer.config.load import load_with_origins
  from trainer.launch.launcher_keys import program, refuse_other
  from trainer.process import file_limit
  from worlds.supervisor import Supervisor

  _check(options)
  ours = {"cluster": "multiprocess", "num_slices": str(options.slices)}
  arguments = [*options.arguments, *refuse_other(options.arguments, "trainer.launch.local", ours)]
  config, given = load_with_origins(arguments, repeats=False)
  least = config.elastic.elastic_min_slice_count
  if least > options.slices:
    raise ConfigError(f"elastic_min_slice_count={least} is more than --slices {options.slices}.\nLower it.")
  validate.check_switch(config, given)
  rules = run_rules(shares.resolve(config))
  check(rules, options.processes_per_slice)
  local = (options.slices if options.local_slices is None else options.local_slices) + options.spares
  if local and config.elastic.exchange_network:
    exchange_host(config.elastic.exchange_network)  # wrong input: before a process starts
  _check_local(options, rules.minimum)
  where = _listen(options) if options.listen else None
  file_limit.raise_limit()  # each member has a connection
  supervisor = Supervisor(
    program(),
    arguments,
    rules,
    local=local,
    lanes=options.processes_per_slice,
    grace=config.checkpoint.autocheckpoint_grace_seconds,
    where=where,
    expected=None if where else options.local_slices,
  )
  return supervisor.run()


def _check(options: argparse.Namespace) -> None:
  from trainer.config import ConfigError

  if options.local_slices is not None and options.local_slices > options.slices:
    raise ConfigError(f"--local-slices {options.local_slices}: it must be 0 to --slices.")
  for name in ("advertise", "token_file"):
    if (value := getattr(options, name)) and not options.listen:
      raise ConfigError(
        f"--{name.replace('_', '-')} {value}: it has an effect only with --listen.\n"
        "Add --listen HOST:PORT, or remove it."
      )


def _check_local(options: argparse.Namespace, minimum: int) -> None:
  """Raises ConfigError if there are fewer slices than the run needs, and no agent can start more."""
  from trainer.config import ConfigError

  local = options.slices if options.local_slices is None else options.local_slices
  if local < minimum and not options.listen:
    raise ConfigError(
      f"--local-slices {local} of --slices {options.slices}: agents run the others.\nAdd --listen HOST:PORT, where "
      f"agents find this command. To run on {local} slices only, set elastic_enabled=true elastic_min_slice_count=1."
    )


def _listen(options: argparse.Namespace) -> Where:
  """Listens at --listen. Raises ConfigError if that is impossible."""
  from trainer.cluster import job_token
  from trainer.config import ConfigError
  from worlds import addresses
  from worlds.membership.server import BACKLOG
  from worlds.supervisor import Where

  try:
    host, port = addresses.split(options.listen)
  except ValueError as error:
    raise ConfigError(f"--listen {options.listen}: {error}.") from error
  if host in ("0.0.0.0", "::") and not options.advertise:
    raise ConfigError(f"--listen {options.listen}: other hosts need one address.\nAdd --advertise HOST.")
  token = job_token(options.token_file)
  try:
    listener = addresses.listen(host, port, BACKLOG)
  except OSError as error:
    raise ConfigError(f"--listen {options.listen}: {error}.\nGive an address of this host, and a free port.") from error
  return Where(listener, options.advertise or host, token)


if __name__ == "__main__":
  run_launcher(main)
