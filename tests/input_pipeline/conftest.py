"""Shared by the tests of data."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import trainer


@pytest.fixture
def python() -> Callable[..., subprocess.Popen]:
  """Starts another interpreter that runs a program text with arguments and finds the package; killed at the end."""
  environment = {**os.environ, "PYTHONPATH": str(Path(trainer.__file__).parents[1])}
  started = []

  def start(code: str, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-c", code, *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    started.append(process)
    return process

  yield start
  for process in started:
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()
