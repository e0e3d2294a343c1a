"""A Pathways stand-in as a child process, and commands for a running one.

The server itself is the package pathways_standin. This module imports neither JAX nor gRPC.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

START_SECONDS = 120.0
_STOP_SECONDS = 5.0
_COMMAND_SECONDS = 60.0
_BAD_INPUT = 2  # exit code of the server


class StandinError(RuntimeError):
  """The server does not start, does not answer, or refuses a command."""


class StandinLost(StandinError):
  """The server has ended while it started, although its arguments are right: it may start the next time."""


class Standin:
  """A running server that this process has started. It ends with this process, however this process ends."""

  def __init__(self, process: subprocess.Popen[str], address: str, control_path: str) -> None:
    """address: for JAX_BACKEND_TARGET."""
    self.process, self.address, self.control_path = process, address, control_path

  def control(self, *words: str | int) -> dict[str, Any]:
    """What the server reports about a command, for example control("kill", 1). Raises StandinError.

    `python -m pathways_standin.control --help` lists the commands.
    """
    return send(self.control_path, [str(word) for word in words])

  def close(self) -> None:
    """Ends the server, gently and then by force. May be called again."""
    assert self.process.stdin is not None and self.process.stdout is not None
    with contextlib.suppress(OSError):
      self.process.stdin.close()  # the server ends when its input ends
    try:
      self.process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
      self.process.kill()
      self.process.wait()
    Path(self.control_path).unlink(missing_ok=True)  # of a server that was killed
    self.process.stdout.close()


def start_standin(
  slices: int,
  devices_per_slice: int,
  device_kind: str = "cpu",
  *,
  arguments: tuple[str, ...] = ("--port", "0"),
  log: IO[str] | None = None,
) -> Standin:
  """Starts a server and returns when it accepts clients.

  arguments: more arguments of the command. log: receives what the server writes to its standard error; None: this
  process's standard error. Raises StandinError if it does not start: StandinLost if its arguments are right.
  """
  command = [sys.executable, "-m", "pathways_standin", "--child", *arguments]
  command += ["--slices", str(slices), "--devices-per-slice", str(devices_per_slice), "--device-kind", device_kind]
  # A process group of its own: Ctrl-C reaches this process only, which may still need the devices to save its state.
  process = subprocess.Popen(
    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, process_group=0
  )
  assert process.stdout is not None
  line = _first_line(process.stdout, START_SECONDS)
  if not line:
    process.kill()
    process.communicate()  # closes the pipes
    kind = StandinError if process.returncode == _BAD_INPUT else StandinLost
    raise kind(f"the Pathways stand-in did not start (exit code {process.returncode}). Its messages say why.")
  ready = json.loads(line)
  return Standin(process, ready["address"], ready["control"])


def _first_line(pipe: IO[str], seconds: float) -> str:
  """The first line, or "" if the stream ends or the time is over."""
  with selectors.DefaultSelector() as selector:
    selector.register(pipe, selectors.EVENT_READ)
    return pipe.readline() if selector.select(seconds) else ""


def send(path: str | Path, words: list[str]) -> dict[str, Any]:
  """Sends one command to the server with this control socket and returns what it reports. Raises StandinError."""
  end = time.monotonic() + _COMMAND_SECONDS
  with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
    sock.settimeout(_COMMAND_SECONDS)
    try:
      sock.connect(str(path))
      sock.sendall(json.dumps(words).encode() + b"\n")
      answer = b""
      while not answer.endswith(b"\n") and time.monotonic() < end:
        part = sock.recv(1 << 16)
        if not part:
          break
        answer += part
    except OSError as error:
      raise StandinError(f"{path}: no Pathways stand-in answers ({error}). Start one, or correct the port.") from error
  if not answer.endswith(b"\n"):
    if words == ["exit"]:
      return {}
    raise StandinError(f"{path}: the Pathways stand-in ended before it answered {' '.join(words)!r}.")
  report: dict[str, Any] = json.loads(answer)
  if "error" in report:
    raise StandinError(report["error"])
  return report


def control_path(address: str) -> str:
  """The control socket of the server at the address ("127.0.0.1:29000" or "unix:PATH").

  The folder of the sockets belongs to this user, and nobody else can enter it. Raises StandinError if it cannot be so.
  """
  if address.startswith("unix:"):
    return f"{address.removeprefix('unix:')}.control"
  try:
    folder = Path(tempfile.gettempdir()) / f"pathways-standin-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
  except OSError as error:
    raise StandinError(
      f"no folder for the control socket: {error}. Set TMPDIR to a folder that you can write."
    ) from error
  if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
    raise StandinError(f"{folder} must be a folder that only its owner, user {os.getuid()}, can enter. Remove it.")
  return str(folder / f"{address.rpartition(':')[2]}.control")
