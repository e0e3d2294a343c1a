"""The arguments that the server and the control command share, and the text about commands."""

from __future__ import annotations

import argparse

PORT = 29000  # what Pathways uses

COMMANDS = """\
status                      the slices, the dispatches so far, and what each client holds
kill SLICE [CODE [TEXT]]    the slice and its data are lost (CODE: DATA_LOSS unless given)
revive SLICE                a lost slice works again, with empty memory
hang SLICE [SECONDS]        nothing that needs the slice becomes ready until `release`, or for SECONDS
release SLICE               ends a hang
slow SLICE SECONDS          every program on the slice takes SECONDS longer; 0 ends it
reset                       all slices work, none is slow, and nothing is planned
drop                        ends the connections of all clients
exit                        the server process ends at once
at DISPATCH COMMAND         the command, as soon as so many programs have been dispatched; +N: N more than now"""


def whole(text: str) -> int:
  """A whole number in the digits 0 to 9, for argparse. Python's int reads the digits of every script."""
  if not text.isascii():
    raise argparse.ArgumentTypeError(f"{text} is not a whole number")
  return int(text)


def add_address(parser: argparse.ArgumentParser) -> None:
  group = parser.add_mutually_exclusive_group()
  group.add_argument("--port", type=whole, default=PORT, help=f"port of the loopback address ({PORT}; 0: a free one)")
  group.add_argument("--unix", metavar="PATH", help="a Unix socket instead of a port")


def address(options: argparse.Namespace) -> str:
  """The address in gRPC's form."""
  return f"unix:{options.unix}" if options.unix else f"127.0.0.1:{options.port}"
