"""Hosts of one machine: network namespaces at a bridge, whose links can be cut. Linux, iproute2 and `unshare`."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator

SUPERVISOR, FAR, NEAR = "10.77.0.1", "10.77.0.2", "10.77.0.3"
INSIDE = ["unshare", "--user", "--map-root-user", "--net"]  # runs a command that may make namespaces
_NOBODY = "02:00:00:00:00:ff"  # the address of no network card


class Network:
  """A bridge with the supervisor's address, and hosts at it. To be used in a network namespace of its own."""

  def __init__(self) -> None:
    self._holders: dict[str, subprocess.Popen[bytes]] = {}  # a process in the namespace of each host
    _ip("link set lo up")
    _ip("link add bridge type bridge")
    _ip(f"addr add {SUPERVISOR}/24 dev bridge")
    _ip("link set bridge up")

  def add(self, host: str) -> None:
    """Adds a host with this address."""
    holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
    self._holders[host] = holder
    name, own = f"port{len(self._holders)}", os.readlink("/proc/self/ns/net")
    while os.readlink(f"/proc/{holder.pid}/ns/net") == own:
      time.sleep(0.01)
    _ip(f"link add {name} type veth peer name card netns {holder.pid}")
    _ip(f"link set {name} master bridge up")
    for command in (f"addr add {host}/24 dev card", "link set card up", "link set lo up"):
      _ip(command, self.prefix(host))

  def prefix(self, host: str) -> list[str]:
    """What runs a command on the host."""
    return [] if host == SUPERVISOR else ["nsenter", "--target", str(self._holders[host].pid), "--net"]

  def cut(self, *pairs: tuple[str, str]) -> None:
    """No packet travels between the two hosts of each pair."""
    for one, other in pairs:
      for here, there in ((one, other), (other, one)):
        _ip(f"neigh replace {there} lladdr {_NOBODY} dev {self._card(here)} nud permanent", self.prefix(here))

  def mend(self, *pairs: tuple[str, str]) -> None:
    """Ends a cut."""
    for one, other in pairs:
      for here, there in ((one, other), (other, one)):
        _ip(f"neigh del {there} dev {self._card(here)}", self.prefix(here))

  def _card(self, host: str) -> str:
    return "bridge" if host == SUPERVISOR else "card"

  def close(self) -> None:
    for holder in self._holders.values():
      holder.kill()
      holder.wait()


def _ip(arguments: str, prefix: list[str] | None = None) -> None:
  subprocess.run([*(prefix or []), "ip", *arguments.split()], check=True)


@contextlib.contextmanager
def hosts() -> Iterator[Network]:
  """A network with the two hosts; nothing is left of it at the end of the block."""
  network = Network()
  try:
    for host in (FAR, NEAR):
      network.add(host)
    yield network
  finally:
    network.close()
