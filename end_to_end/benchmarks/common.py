"""Code that several benchmarks share: types of command-line arguments, configurations, and timing."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from tests.support.command import ROOT

from trainer.config import load
from trainer.config.schema import Config


def positive(text: str) -> int:
  """Returns the whole number `text`, at least 1, for argparse."""
  if not text.isdecimal() or int(text) < 1:
    raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number of at least 1")
  return int(text)


def cpu_seconds() -> float:
  """Returns the CPU time of this process and of the processes that it has started and that have ended."""
  return sum(os.times()[:4])


def positives(text: str) -> list[int]:
  """Returns the whole numbers of a text such as "1,2,3", each at least 1, for argparse."""
  try:
    return [positive(part) for part in text.split(",")]
  except argparse.ArgumentTypeError:
    raise argparse.ArgumentTypeError(f"{text!r}: must be whole numbers of at least 1, separated by commas") from None


def model_config(model: str, defaults: Sequence[str], keys: Sequence[str]) -> Config:
  """Returns the configuration of a published model with the keys `defaults`, or `keys` instead. Raises ConfigError."""
  given = {key.split("=")[0]: key for key in (*defaults, *keys)}
  return load(
    ["configs/base.yml", f"model_name={model}", "run_name=t", "base_output_directory=unused", *given.values()],
    check_paths=False,
  )


def run_and_time_lines(command: Sequence[str], environment: Mapping[str, str]) -> list[tuple[float, str]]:
  """Runs `command` on the CPU and returns (seconds since the start, line) for each line that it prints.

  Ends this process with the last lines of the output if the command fails.
  """
  start = time.monotonic()
  process = subprocess.Popen(
    command,
    env=os.environ | {"JAX_PLATFORMS": "cpu"} | dict(environment),
    cwd=ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )
  assert process.stdout is not None
  lines = [(time.monotonic() - start, line) for line in process.stdout]
  if process.wait():
    last = "".join(line for _, line in lines[-30:])
    sys.exit(f"{' '.join(command)} ended with exit code {process.returncode}:\n{last}")
  return lines
