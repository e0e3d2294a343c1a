"""Entries of the compilation cache that cannot be read are compiled again once, and then read from the cache."""

from __future__ import annotations

import os
import pathlib
import random
import subprocess
import sys
import warnings

import pytest

from trainer.process import compilation_cache

SOURCES = pathlib.Path(__file__).parents[2] / "src"
PROGRAM = """
import sys, warnings
from trainer.process import compilation_cache
compilation_cache.enable(sys.argv[1])
import jax
from trainer.observe.compiles import CompileCounter

@jax.jit
def first(x):
  return x * 2

@jax.jit
def second(x):
  return x + 3

with CompileCounter() as counter:
  first(1.0), first(jax.numpy.ones(3)), second(1.0)
  print("compiled", counter.compilations)
warnings.warn("passed on")
"""


def run(cache: pathlib.Path) -> tuple[int, str]:
  """The number of programs that a process compiled, and what it wrote to stderr."""
  environment = os.environ | {"PYTHONPATH": str(SOURCES), "JAX_PLATFORMS": "cpu"}
  result = subprocess.run(
    [sys.executable, "-c", PROGRAM, str(cache)],
    env=environment,
    capture_output=True,
    text=True,
    timeout=240,
    check=True,
  )
  assert "passed on" in result.stderr
  return int(result.stdout.split()[-1]), result.stderr


def truncate(data: bytes) -> bytes:
  return data[: len(data) // 2]


def garble(data: bytes) -> bytes:
  broken, rng = bytearray(data), random.Random(len(data))
  for _ in range(3):
    broken[rng.randrange(len(broken))] ^= 1 << rng.randrange(8)
  return bytes(broken)


def test_unreadable_entries_are_replaced(tmp_path):
  compiled, _ = run(tmp_path)
  entries = {path: path.read_bytes() for path in tmp_path.glob("*-cache")}
  assert compiled == len(entries) >= 3
  for i, (path, data) in enumerate(entries.items()):
    path.write_bytes([truncate, garble, lambda data: b""][i % 3](data))
  compiled, text = run(tmp_path)
  assert compiled == len(entries)
  assert text.count("has entries that cannot be read") == 1 and "Error reading persistent" not in text
  assert sorted(tmp_path.glob("*-cache")) == sorted(entries)
  compiled, text = run(tmp_path)
  assert compiled == 0 and "cannot be read" not in text


@pytest.mark.parametrize("failure", ["reading", "writing"])
def test_a_folder_that_cannot_be_used_is_said_once_and_is_no_damaged_entry(capsys, failure):
  text = f"Error {failure} persistent compilation cache entry for 'jit_step': PermissionError: [Errno 13] no: '/x'"
  with warnings.catch_warnings(record=True) as others:
    end = compilation_cache.enable("/x")
    warnings.showwarning(UserWarning(text), UserWarning, "compiler.py", 1)
    warnings.showwarning(UserWarning(text), UserWarning, "compiler.py", 1)
    end()
  printed = capsys.readouterr().err
  assert printed.startswith(f"warning: jax_cache_dir=/x: {failure} failed (PermissionError") and not others
  assert printed.count("\n") == 1 and "killed" not in printed and "or jax_cache_dir= for no cache" in printed
