"""A running server for the tests of this folder, and programs that are its clients."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from tests.support.command import standin_environment

from pathways_standin.process import Standin, start_standin


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
  command, environment = [sys.executable, "-m", module, *arguments], standin_environment(server.address, platforms)
  result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)
  assert result.returncode == 0, result.stderr[-4000:]
  return json.loads(result.stdout.splitlines()[-1])
