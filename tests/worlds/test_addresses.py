"""Addresses as text, and sockets that listen there."""

from __future__ import annotations

import socket

import pytest

from worlds import addresses


@pytest.mark.parametrize(
  ("text", "host", "port"),
  [
    ("10.0.0.1:7777", "10.0.0.1", 7777),
    ("[fd00::1]:1", "fd00::1", 1),
    ("node-1.cluster:65535", "node-1.cluster", 65535),
  ],
)
def test_an_address_is_host_and_port(text, host, port):
  assert addresses.split(text) == (host, port) and addresses.join(host, port) == text


@pytest.mark.parametrize(
  "text",
  [
    *("", "7777", ":7777", "host", "host:", "host:x", "host:65536", "host:-1", "host:\u00b2"),
    *("::1:7777", "[::1]", "[h]:1"),
  ],
)
def test_other_texts_are_refused(text):
  with pytest.raises(ValueError, match="it must be HOST:PORT"):
    addresses.split(text)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_a_socket_listens_where_others_connect(host):
  try:
    listener = addresses.listen(host, 0, 1)
  except OSError:
    pytest.skip(f"this machine has no address {host}")
  with listener, socket.create_connection(listener.getsockname()[:2], timeout=5):
    pass


@pytest.mark.parametrize(
  ("network", "found"),
  [
    *(("eth1", "10.1.0.7"), ("10.2.0.0/16", "10.2.3.4"), ("10.2.3.0/24", "10.2.3.4"), ("fd00::/8", "fd00::7")),
    *(("down", None), ("eth9", None), ("10.9.0.0/16", None), ("10.1.0.0/99", None), ("10.2.3.4", "10.2.3.4")),
  ],
)
def test_a_network_is_an_interface_or_a_subnet(network, found):
  interfaces = {"lo": ["127.0.0.1", "::1"], "eth1": ["10.1.0.7", "10.2.3.4", "fd00::7"], "down": []}
  assert addresses.on_network(network, interfaces) == found
