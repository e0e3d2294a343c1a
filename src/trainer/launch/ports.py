"""Ports of this host."""

from __future__ import annotations

import socket


def free_port() -> int:
  """A port of the loopback address that nobody listens on now."""
  with socket.socket() as sock:
    sock.bind(("127.0.0.1", 0))
    return int(sock.getsockname()[1])
