"""Test configuration: eight CPU devices in one process, whatever accelerators the machine has; quick compilations."""

from __future__ import annotations

import os
from collections.abc import Iterator

# Before jax is imported anywhere: tests must not touch an accelerator that somebody else is using.
os.environ["JAX_PLATFORMS"] = "cpu"
# Programs here run a few steps on a few numbers: most of a test's time would be LLVM optimizing what it compiles.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(autouse=True, scope="module")
def _free_compiled_programs() -> Iterator[None]:
  """Lets go of a module's compiled programs: each holds memory maps, and Linux allows a process 65,530 of them."""
  yield
  jax.clear_caches()
