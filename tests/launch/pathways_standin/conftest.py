"""A running server for the tests of this folder, and programs that are its clients."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.standin import Standin, start_standin


@pytest.fixture(scope="package")
def server(tmp_path_factory):
  """Two slices of two devices."""
  with open(tmp_path_factory.mktemp("standin") / "log", "w+") as log:
    running = start_standin(2, 2, "TPU v5 lite", log=log)
    yield running
    running.close()
    log.seek(0)
    assert " failed\nTraceback" not in log.read()  # no request met an unexpected error; gRPC's own lines differ


def run_client(server: Standin, module: str, *arguments: str, platforms: str = "proxy", seconds: float = 240):
  """The last line that a program prints, which is JSON."""
  environment = os.environ | {
    "IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS": "true",
    "JAX_PLATFORMS": platforms,
    "JAX_BACKEND_TARGET": server.address,
    "PYTHONPATH": os.pathsep.join(["src", "."]),
  }
  command = [sys.executable, "-m", module, *arguments]
  result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)
  assert result.returncode == 0, result.stderr[-4000:]
  return json.loads(result.stdout.splitlines()[-1])


def is_running(pid: int) -> bool:
  """Whether the process exists and has not ended."""
  with contextlib.suppress(OSError):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
  return False
