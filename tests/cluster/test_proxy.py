"""Connecting to a Pathways proxy: every failure is one clear message, before any device is used."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from trainer.cluster import proxy
from trainer.config.errors import ConfigError


def environment(target="", seconds="1", **others):
  return {"JAX_BACKEND_TARGET": target, "PATHWAYS_PROXY_CONNECTION_TIMEOUT_SECS": seconds} | others


@pytest.fixture
def free_port():
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    return s.getsockname()[1]


@pytest.fixture
def started(monkeypatch):
  """Replaces the calls to JAX and records them."""
  calls = []
  monkeypatch.setattr(proxy.pathwaysutils, "initialize", lambda: calls.append("initialize"))
  monkeypatch.setattr(proxy.jax, "devices", lambda: calls.append("devices") or ["device"])
  return calls


@pytest.mark.parametrize(
  "target", ["", "localhost:29000", "grpc://localhost", "grpc://localhost:0", "tcp://localhost:29000"]
)
def test_a_target_that_is_no_address_is_refused_at_once(started, target):
  with pytest.raises(ConfigError, match=r"JAX_BACKEND_TARGET, found .*\nSet it like JAX_BACKEND_TARGET=grpc://"):
    proxy.connect(environment(target, seconds="1000"))
  assert not started


@pytest.mark.parametrize("host", ["127.0.0.1", "nowhere.invalid"])
def test_no_server_ends_after_the_timeout_with_a_remedy(started, free_port, host):
  lines, start = [], time.monotonic()
  with pytest.raises(ConfigError, match=r"no Pathways proxy answered within 1 s .*\n.*TIMEOUT_SECS to wait longer"):
    proxy.connect(environment(f"grpc://{host}:{free_port}"), lines.append, pause_seconds=0.1)
  assert time.monotonic() - start < 10
  assert "Connecting to the Pathways proxy" in lines[0] and not started


def test_a_proxy_that_starts_later_is_waited_for(started, free_port):
  listener = socket.socket()

  def listen():
    listener.bind(("127.0.0.1", free_port))
    listener.listen()

  threading.Timer(0.5, listen).start()
  with listener:
    target = f"grpc://127.0.0.1:{free_port}"
    assert proxy.connect(environment(target, seconds="30"), lambda line: None, pause_seconds=0.05) == ["device"]
  assert started == ["initialize", "devices"]


def test_a_server_that_refuses_the_client_is_one_message(monkeypatch, started):
  def devices():
    raise RuntimeError("Unable to initialize backend 'proxy': UNAVAILABLE: handshake failed")

  monkeypatch.setattr(proxy.jax, "devices", devices)
  with socket.create_server(("127.0.0.1", 0)) as server:
    target = f"grpc://127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(ConfigError, match="handshake failed") as caught:
      proxy.connect(environment(target), lambda line: None)
  assert "IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS=true" in str(caught.value)
