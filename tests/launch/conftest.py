"""What the tests of launchers share."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session")
def compiled(tmp_path_factory) -> str:
  """The key of a compilation cache that all tests of this folder share, in every worker of pytest."""
  base = tmp_path_factory.getbasetemp()
  return f"jax_cache_dir={(base.parent if 'PYTEST_XDIST_WORKER' in os.environ else base) / 'launch-compiled'}"
