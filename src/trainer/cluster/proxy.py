"""Connects to the IFRT proxy of a Pathways job, with a clear message where that fails."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Mapping

import jax
import pathwaysutils

from trainer.config.errors import ConfigError
from worlds import lines

_TARGET = "JAX_BACKEND_TARGET"
_TIMEOUT = "PATHWAYS_PROXY_CONNECTION_TIMEOUT_SECS"
_INSECURE = "IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS"
_DEFAULT_TIMEOUT = 120  # seconds, the client's own default
_ATTEMPT_SECONDS = 5.0


def connect(
  environment: Mapping[str, str], log: Callable[[str], None] = lines.tell, pause_seconds: float = 1.0
) -> list[jax.Device]:
  """The devices of the proxy that the environment names. Waits for a proxy that has not started yet. Raises ConfigError
  if JAX_BACKEND_TARGET is no address, nothing listens there, or the proxy refuses the connection."""
  target = environment.get(_TARGET, "")
  timeout = _timeout(environment)
  host, port = _address(target)
  log(f"Connecting to the Pathways proxy at {target}, for up to {timeout} s ({_TIMEOUT}).")
  _wait_for_listener(target, host, port, timeout, pause_seconds)
  pathwaysutils.initialize()
  try:
    return jax.devices()
  except RuntimeError as error:
    raise ConfigError(
      f"{_TARGET}={target}: a server listens there, but the IFRT proxy client cannot use it: {error}\n"
      f"Check that it is a Pathways proxy of the same jaxlib version. The client requires secure (ALTS) credentials; "
      f"for a proxy without them set {_INSECURE}=true."
    ) from error


def _address(target: str) -> tuple[str, int]:
  match = re.fullmatch(r"grpc://(?P<host>[^/:\s]+|\[[0-9a-fA-F:]+\]):(?P<port>\d{1,5})", target)
  if match is None or not 0 < int(match["port"]) < 65536:
    raise ConfigError(
      f"cluster=pathways needs the address of the Pathways proxy in {_TARGET}, found {target!r}.\n"
      f"Set it like {_TARGET}=grpc://localhost:29000."
    )
  return match["host"].strip("[]"), int(match["port"])


def _timeout(environment: Mapping[str, str]) -> int:
  given = environment.get(_TIMEOUT, "") or str(_DEFAULT_TIMEOUT)
  if not given.isdecimal() or int(given) == 0:
    raise ConfigError(f"{_TIMEOUT}={given} must be a whole number of seconds, at least 1.\nSet it like {_TIMEOUT}=120.")
  return int(given)


def _wait_for_listener(target: str, host: str, port: int, timeout: int, pause_seconds: float) -> None:
  """Returns once a TCP connection succeeds. The client's own wait is silent, and ends with a traceback."""
  end = time.monotonic() + timeout
  while True:
    try:
      socket.create_connection((host, port), min(_ATTEMPT_SECONDS, timeout)).close()
      return
    except OSError as error:
      if time.monotonic() + pause_seconds >= end:
        raise ConfigError(
          f"{_TARGET}={target}: no Pathways proxy answered within {timeout} s ({error}).\n"
          f"Start the proxy, correct the address, or set {_TIMEOUT} to wait longer."
        ) from error
    time.sleep(pause_seconds)
