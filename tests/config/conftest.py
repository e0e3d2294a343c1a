"""Shared by the tests of the configuration."""

from __future__ import annotations

import pytest

from trainer.config import paths


@pytest.fixture
def gcsfs(monkeypatch):
  """Accepts gs:// addresses even if the package gcsfs is not installed."""
  monkeypatch.setattr(paths, "is_installed", lambda package: package == "gcsfs")
