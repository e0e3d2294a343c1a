"""Values of a parameter of which every change is tested with a few, and a release with all (`-m soak`)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def few(kept: Collection[Any], values: Iterable[Any]) -> list[Any]:
  """The values for pytest.mark.parametrize; those that are not in `kept` have the mark `soak`."""
  as_param = lambda value: pytest.param(*(value if isinstance(value, tuple) else [value]), marks=pytest.mark.soak)
  return [value if value in kept else as_param(value) for value in values]
