"""Addresses of processes as text: "HOST:PORT", with an IPv6 address in brackets, "[::1]:7777"."""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

_SIOCGIFCONF = 0x8912  # of ioctl(2) on Linux: all interfaces with their IPv4 addresses
_REQUEST = 40  # bytes of each in the answer: the name in the first 16, the address from byte 20 on


def join(host: str, port: int) -> str:
  return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split(address: str) -> tuple[str, int]:
  """Returns the host, without brackets, and the port. Raises ValueError if `address` has another form."""
  host, _, port = address.rpartition(":")
  bare = host.removeprefix("[").removesuffix("]") if host.startswith("[") and host.endswith("]") else host
  if not bare or (":" in bare) == (bare == host) or not (port.isascii() and port.isdecimal() and int(port) < 1 << 16):
    raise ValueError("it must be HOST:PORT, such as 10.0.0.1:7777 or [fd00::1]:7777")
  return bare, int(port)


def listen(host: str, port: int, backlog: int) -> socket.socket:
  """Returns a socket that listens at an address of this host; port 0: a free port. Raises OSError."""
  family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
  return socket.create_server((host, port), family=family, backlog=backlog)


def on_network(network: str, interfaces: Mapping[str, list[str]]) -> str | None:
  """Returns the first of the addresses {interface: its addresses} on a network: an interface, or a subnet such as
  10.1.0.0/16. None: there is none."""
  if network in interfaces:
    return next(iter(interfaces[network]), None)
  try:
    subnet = ipaddress.ip_network(network, strict=False)
  except ValueError:
    return None
  found = [address for of_interface in interfaces.values() for address in of_interface]
  return next((address for address in found if ipaddress.ip_address(address) in subnet), None)


def interfaces() -> dict[str, list[str]]:
  """Returns {network interface of this host: its addresses}: IPv4, then IPv6 without link-local ones. On Linux."""
  import array
  import fcntl

  found: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
  answer = array.array("B", bytes(_REQUEST * 1024))
  start, _ = answer.buffer_info()
  with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
    size, _ = struct.unpack("iL", fcntl.ioctl(sock, _SIOCGIFCONF, struct.pack("iL", len(answer), start)))
  for at in range(0, size, _REQUEST):
    name = answer[at : at + 16].tobytes().partition(b"\0")[0].decode().partition(":")[0]  # eth0:1 is an alias
    found.setdefault(name, []).append(socket.inet_ntoa(answer[at + 20 : at + 24]))
  table = Path("/proc/net/if_inet6")
  for line in table.read_text().splitlines() if table.exists() else ():
    digits, *_, name = line.split()
    if not (address := ipaddress.IPv6Address(bytes.fromhex(digits))).is_link_local:
      found[name].append(str(address))
  return found


def free_port() -> int:
  """A port of the loopback address that nobody listens on now."""
  with socket.socket() as sock:
    sock.bind(("127.0.0.1", 0))
    return int(sock.getsockname()[1])
