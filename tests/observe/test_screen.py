"""Stdout and stderr that are lost while a process prints: it goes on, and says so where that is still possible."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.command import Run, cpu_environment

PRINTS = """
import sys, time
from trainer.observe import log, screen
screen.protect()
out = log.get(sys.argv[1])
for number in range(2000):
  out.line(f"line {number}")
  print("of a library")
  out.error("to stderr") if number % 100 == 0 else None
  time.sleep(0.01 if number < 5 else 0.0)
"""


def lost(kind: str) -> tuple[int, int]:
  """(A descriptor for stdout that is lost, or that `os.close` of the second one loses; or -1)."""
  if kind == "full":
    return os.open("/dev/full", os.O_WRONLY), -1
  if kind == "pipe":
    reader, writer = os.pipe()
    return writer, reader
  terminal, screen = pty.openpty()
  return screen, terminal


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("kind", ["full", "pipe", "terminal"])
def test_a_process_whose_output_is_lost_goes_on_and_says_so(tmp_path, kind, both):
  stdout, other = lost(kind)
  command = [sys.executable, "-c", PRINTS, str(tmp_path)]
  options = {"stdout": stdout, "stderr": stdout if both else subprocess.PIPE, "start_new_session": True}
  with subprocess.Popen(command, env=cpu_environment({}), text=True, **options) as process:
    os.close(stdout)
    if other >= 0:
      os.read(other, 10)
      os.close(other)
    printed = process.communicate(timeout=60)[1]
    assert process.returncode == 0, printed
  lines = (tmp_path / "log.txt").read_text().splitlines()
  assert len(lines) == 2020 and lines[-1].endswith(" line 1999")
  if not both:
    assert printed.count("warning: stdout is lost") == (kind != "pipe")  # a pipe is closed on purpose


KEYS = "dataset_type=synthetic vocab_size=64 learning_rate=1e-2 steps=20 elastic_enabled=false num_slices=1".split()


def test_a_run_with_a_full_disk_for_its_output_completes(compiled, server, tmp_path):
  run = Run(tmp_path, [*KEYS, compiled], server.start)
  run.log = Path("/dev/full")
  assert run.finish(timeout=100) == 0
  assert run.committed_steps() == [20]
