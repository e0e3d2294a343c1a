"""Addresses of processes as text: "HOST:PORT", with an IPv6 address in brackets, "[::1]:7777"."""

from __future__ import annotations

import socket


def join(host: str, port: int) -> str:
  """Returns the address of a port."""
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


def free_port() -> int:
  """A port of the loopback address that nobody listens on now."""
  with socket.socket() as sock:
    sock.bind(("127.0.0.1", 0))
    return int(sock.getsockname()[1])
