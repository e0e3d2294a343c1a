"""Help and --print-config start in well under a second, because they import neither JAX nor the trainer's parts."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

SECONDS = 1.0
HEAVY = ("jax", "numpy", "orbax", "grain", "tensorflow", "rich")

HELP = "from trainer.config import cli; print(cli.help_text())"
PRINT = "from trainer.config import cli, load; print(cli.print_config(load(['configs/base.yml', 'steps=5'])))"


def cpu_seconds() -> float:
  """Processor time of the finished children, which unlike the clock does not depend on what else is running."""
  usage = resource.getrusage(resource.RUSAGE_CHILDREN)
  return usage.ru_utime + usage.ru_stime


@pytest.mark.parametrize(("code", "words"), [(HELP, "  steps=1000\n"), (PRINT, "\nsteps: 5\n")])
def test_printing_is_quick_and_imports_nothing_heavy(code, words):
  check = f"import sys; {code}; print(sorted(set({HEAVY!r}) & sys.modules.keys()))"
  fastest = float("inf")
  for _ in range(3):
    before = cpu_seconds()
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60, check=True)
    fastest = min(fastest, cpu_seconds() - before)
  assert words in result.stdout
  assert result.stdout.endswith("[]\n"), "a heavy package was imported"
  assert fastest < SECONDS
