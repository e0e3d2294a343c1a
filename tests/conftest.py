"""Test configuration: eight CPU devices in one process, whatever accelerators the machine has."""

from __future__ import annotations

import os

# Before jax is imported anywhere: tests must not touch an accelerator that somebody else is using.
os.environ["JAX_PLATFORMS"] = "cpu"

import jax

jax.config.update("jax_num_cpu_devices", 8)
