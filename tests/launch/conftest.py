"""What the tests of launchers share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared(tmp_path_factory) -> Path:
  """A folder that every worker of pytest sees."""
  base = tmp_path_factory.getbasetemp()
  folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "launch"
  folder.mkdir(exist_ok=True)
  return folder


@pytest.fixture(scope="session")
def compiled(shared) -> str:
  """The key of a compilation cache that all tests of this folder share."""
  return f"jax_cache_dir={shared / 'compiled'}"
