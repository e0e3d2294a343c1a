"""Puts the server together and runs it until it is told to end."""

from __future__ import annotations

import json
import logging
import os
import socketserver
import sys
import threading
from pathlib import Path
from typing import Any

from pathways_standin import array_requests, client_requests, executable_requests, process, proxy_messages
from pathways_standin.client_session import ClientSession
from pathways_standin.cpu_slices import Slices
from pathways_standin.devices import Devices
from pathways_standin.fault_commands import CommandError, Commands
from pathways_standin.grpc_wire import INSECURE, Service
from pathways_standin.runtime import Runtime

_log = logging.getLogger(__name__)
_HANDLERS = client_requests.HANDLERS | array_requests.HANDLERS | executable_requests.HANDLERS


class Server:
  def __init__(self, slices: int, devices_per_slice: int, device_kind: str, address: str) -> None:
    """address: as gRPC has it; port 0 chooses one.

    Raises RuntimeError if the address is taken, StandinError for the folder of the control socket.
    """
    known = proxy_messages.load()
    devices = Devices(slices, devices_per_slice, device_kind)
    state, runtime = Slices(devices), Runtime(devices)
    self._service = Service(known, lambda number: ClientSession(number, known, runtime, state, _HANDLERS))
    self.commands = Commands(state, self._service)
    chosen = self._service.start(address)
    self.address = f"grpc://{chosen}"
    self.control_path = process.control_path(chosen)
    self._control = _listen(self.control_path, self.commands)

  def close(self) -> None:
    """Removes the control socket. The process should end now: it has threads in gRPC and XLA."""
    self._control.server_close()
    Path(self.control_path).unlink(missing_ok=True)


class _ControlHandler(socketserver.StreamRequestHandler):
  """One connection: a command, a JSON list of words, on each line; the answer is a line with a JSON object."""

  server: _ControlServer

  def handle(self) -> None:
    for line in self.rfile:
      answer: dict[str, Any]
      try:
        words = json.loads(line)
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
          raise CommandError("a command must be a JSON list of strings")
        answer = self.server.commands.execute(words)
      except (CommandError, json.JSONDecodeError, UnicodeDecodeError) as error:
        answer = {"error": str(error)}
      self.wfile.write(json.dumps(answer).encode() + b"\n")


class _ControlServer(socketserver.ThreadingUnixStreamServer):
  daemon_threads = True

  def __init__(self, path: str, commands: Commands) -> None:
    self.commands = commands
    super().__init__(path, _ControlHandler)

  def handle_error(self, request: Any, client_address: Any) -> None:
    _log.warning("a control connection failed", exc_info=sys.exception() if hasattr(sys, "exception") else True)


def _listen(path: str, commands: Commands) -> _ControlServer:
  """Serves commands on a socket that only this user can open."""
  Path(path).unlink(missing_ok=True)  # of a server that was killed: this server has the address now
  previous = os.umask(0o177)
  try:
    server = _ControlServer(path, commands)
  except OSError as error:
    raise process.StandinError(f"{path}: cannot listen for commands ({error}). Use a shorter --unix path.") from error
  finally:
    os.umask(previous)
  threading.Thread(target=server.serve_forever, name="standin-control", daemon=True).start()
  return server


def describe(server: Server, slices: int, devices_per_slice: int) -> str:
  """What a user needs to know about a server that runs."""
  target = server.address.removeprefix("grpc://")
  kind, _, rest = target.rpartition(":")
  where = f"--unix {rest}" if kind == "unix" else f"--port {rest}"
  return (
    f"Pathways stand-in: {slices} slices with {devices_per_slice} devices each, at {server.address}\n"
    f"  run a program:  {INSECURE}=true JAX_PLATFORMS=proxy JAX_BACKEND_TARGET={server.address} python ...\n"
    f"  lose a slice:   python -m pathways_standin.control {where} kill 0"
  )
