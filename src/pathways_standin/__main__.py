"""The command `python -m pathways_standin`; the package's docstring describes it."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import logging
import os
import signal
import sys
import threading
from typing import Any

from pathways_standin.arguments import COMMANDS, add_address, address, whole
from pathways_standin.process import StandinError

_MOST_DEVICES = 512  # threads of forced CPU devices: more than a machine can run
_BAD_INPUT = 2


def main(argv: list[str] | None = None) -> int:
  """Serves until a request to end, Ctrl-C or, with --child, the end of standard input. Returns the exit code."""
  parser = argparse.ArgumentParser(
    prog="python -m pathways_standin",
    description="Serve JAX's Pathways (IFRT proxy) client, with slices of CPU devices that can be lost.",
    epilog=f"commands, for --at and for `python -m pathways_standin.control`:\n{COMMANDS}",
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  parser.add_argument("--slices", type=whole, default=2)
  parser.add_argument("--devices-per-slice", type=whole, default=1)
  parser.add_argument("--device-kind", default="cpu", help="what clients see as device_kind; it changes nothing else")
  add_address(parser)
  parser.add_argument("--at", action="append", default=[], metavar="'DISPATCH COMMAND'", help="a fault; repeatable")
  parser.add_argument("--child", action="store_true", help="end when standard input ends; print one line of JSON")
  options = parser.parse_args(argv)
  if message := _mistake(options):
    print(f"error: {message}", file=sys.stderr)
    return _BAD_INPUT
  logging.basicConfig(format="pathways stand-in: %(message)s", stream=sys.stderr)
  logging.getLogger("trainer").setLevel(logging.WARNING if options.child else logging.INFO)
  return _serve(options)


def _mistake(options: argparse.Namespace) -> str:
  """What is wrong with the arguments; "" if nothing is."""
  for name in ("slices", "devices_per_slice"):
    if getattr(options, name) < 1:
      return f"--{name.replace('_', '-')} {getattr(options, name)} must be at least 1."
  if (devices := options.slices * options.devices_per_slice) > _MOST_DEVICES:
    return f"{devices} devices are too many to simulate. Use at most {_MOST_DEVICES}."
  if not 0 <= options.port < 65536:
    return f"--port {options.port} is no port. Use 0 to 65535."
  if options.unix and not os.path.isdir(os.path.dirname(options.unix) or "."):
    return f"--unix {options.unix}: its folder does not exist. Make it, or give another path."
  if importlib.util.find_spec("grpc") is None:
    return "the package grpcio is missing. Run python -m pip install grpcio protobuf."
  return ""


def _serve(options: argparse.Namespace) -> int:
  from pathways_standin import standin_server as server_lib
  from pathways_standin.fault_commands import CommandError

  ended = threading.Event()
  code = 0

  def stop(number: int, frame: Any) -> None:
    nonlocal code
    code = 128 + number
    ended.set()

  numbers = [signal.SIGTERM, signal.SIGINT]
  if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
    numbers.append(signal.SIGHUP)
  for number in numbers:
    signal.signal(number, stop)
  try:
    sizes = (options.slices, options.devices_per_slice)
    server = server_lib.Server(*sizes, options.device_kind, address(options))
    for planned in options.at:
      server.commands.execute(["at", *planned.split()])
  except (RuntimeError, CommandError, OSError) as error:
    print(f"error: {error}", file=sys.stderr)
    return _BAD_INPUT if isinstance(error, CommandError | StandinError) else 1
  if options.child:
    threading.Thread(target=_wait_for_parent, args=(ended,), name="standin-parent", daemon=True).start()
    text = json.dumps({"address": server.address, "control": server.control_path})
  else:
    text = server_lib.describe(server, options.slices, options.devices_per_slice)
  try:
    print(text, flush=True)
    ended.wait()
  except OSError as error:
    print(f"error: cannot print the address of the server: {error}", file=sys.stderr)
    code = 1
  finally:
    server.close()
  return code


def _wait_for_parent(ended: threading.Event) -> None:
  """Thread: the other end of standard input closes when the parent ends."""
  sys.stdin.read()
  ended.set()


if __name__ == "__main__":
  exit_code = main()
  for stream in (sys.stdout, sys.stderr):
    with contextlib.suppress(OSError):  # a full disk
      stream.flush()
  os._exit(exit_code)  # threads inside gRPC and XLA would delay or abort the end of the interpreter
