"""Tests that not every environment or fork can run.

`.ci/run` runs the tests with the mark `oldest` in the environment with the oldest Python, because the other one lacks
torch or libtpu.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

LIBTPU = [
  pytest.mark.oldest,
  pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler: pip install libtpu"),
]


def libtpu(test: Callable[..., Any]) -> Callable[..., Any]:
  """Decorates one test."""
  for mark in LIBTPU:
    test = mark(test)
  return test


def _has_cuda() -> bool:
  return importlib.util.find_spec("jax_plugins") is not None and any(
    importlib.util.find_spec(f"jax_plugins.xla_cuda{version}") for version in (12, 13)
  )


cuda = pytest.mark.skipif(not _has_cuda(), reason="needs the compiler for GPUs: bash setup.sh --gpu")

WORKSHOP = ("services", "report", "trust", "weights", "preflight", "launch", "tools")  # docs/how_to/leave_a_part_out.md
deleted = [name for name in WORKSHOP if importlib.util.find_spec(f"trainer.{name}") is None]
workshop = pytest.mark.skipif(bool(deleted), reason=f"tests parts that this fork has deleted: {deleted}")
