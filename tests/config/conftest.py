"""Shared by the tests of the configuration."""

from __future__ import annotations

import pytest

from trainer.config import paths


@pytest.fixture
def gcsfs(monkeypatch):
  """gs:// addresses are accepted whether or not the package is installed here."""
  monkeypatch.setattr(paths, "_is_installed", lambda package: package == "gcsfs")
