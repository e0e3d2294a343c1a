"""Runs on several hosts: a supervisor, and agents with loopback addresses of their own on this machine."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from tests.support.command import Process
from tests.support.forked_runs import Server
from tests.support.process_runs import ProcessRun

from worlds import addresses
from worlds.addresses import free_port

AGENT = "trainer.launch.agent"
TOKEN = {"TRAINER_TOKEN": "a token of this test only"}


class AgentRun(ProcessRun):
  """A run whose supervisor has `local` slices on its own host; agents run the others."""

  def __init__(
    self,
    folder: Path,
    keys: Sequence[str],
    *,
    slices: int = 3,
    local: int = 0,
    host: str = "127.0.0.1",
    options: Sequence[str] = (),
    server: Server | None = None,
  ) -> None:
    """host: where the supervisor listens. options: more of its options. server: as for ProcessRun."""
    self.address = addresses.join(host, free_port())
    own = ["--local-slices", str(local), "--listen", self.address]
    super().__init__(folder, keys, slices=slices, options=[*own, *options], environment=TOKEN, server=server)

  def agent(
    self, host: str, *, supervisor: str = "", slices: int = 1, prefix: Sequence[str] = (), home: str = ""
  ) -> Process:
    """Starts an agent with the address `host`. supervisor: where it finds the supervisor, if not directly. prefix: a
    command that runs the agent's command. home: its home folder, if not the usual one."""
    environment = TOKEN | ({"HOME": home} if home else {})
    argv = ["--supervisor", supervisor or self.address, "--host", host, "--slices", str(slices)]
    if prefix:
      return self.spawn([*prefix, sys.executable, "-m", AGENT, *argv], environment)
    return self.run_module(AGENT, argv, environment)


class Relay:
  """Passes connections on to another address, until they are cut."""

  def __init__(self, target: str) -> None:
    host, _, port = target.rpartition(":")
    self._target = host, int(port)
    self._sockets: list[socket.socket] = []
    self._listener = socket.create_server(("127.0.0.1", 0))
    self.address = "{}:{}".format(*self._listener.getsockname())
    threading.Thread(target=self._listen, daemon=True).start()

  def cut(self) -> int:
    """Ends all connections. Returns their number."""
    cut, self._sockets = self._sockets, []
    for sock in cut:
      with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    return len(cut) // 2

  def close(self) -> None:
    """Ends everything."""
    with contextlib.suppress(OSError):
      self._listener.shutdown(socket.SHUT_RDWR)
    self._listener.close()
    self.cut()

  def _listen(self) -> None:
    with contextlib.suppress(OSError):
      while True:
        near, _ = self._listener.accept()
        try:
          far = socket.create_connection(self._target)
        except OSError:
          near.close()
          continue
        self._sockets += [near, far]
        for pair in ((near, far), (far, near)):
          threading.Thread(target=_copy, args=pair, daemon=True).start()


def _copy(source: socket.socket, target: socket.socket) -> None:
  with contextlib.suppress(OSError):
    while data := source.recv(1 << 16):
      target.sendall(data)
  with contextlib.suppress(OSError):
    target.shutdown(socket.SHUT_RDWR)
  source.close()
