"""The option for the CPU compiler of XLA: it reaches the compiler, and flags of the user stay unchanged."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from trainer.cluster import cpu_compiler

OURS = f"--xla_backend_extra_options={cpu_compiler.OPTION}"
PROGRAM = """
import jax, jax.numpy as jnp
compiled = jax.jit(lambda x: jnp.exp(x * 2 + 1) / (1 + x * x)).lower(jnp.ones((64, 64))).compile()
print(len(compiled.runtime_executable().serialize()))
"""


@pytest.mark.parametrize(
  "given, expected",
  [
    (None, OURS),
    ("", OURS),
    ("--xla_cpu_multi_thread_eigen=false", f"--xla_cpu_multi_thread_eigen=false {OURS}"),
    ("--xla_backend_extra_options=mine", "--xla_backend_extra_options=mine"),
    (OURS, OURS),
  ],
)
def test_the_option_is_added_unless_the_user_sets_this_flag(given, expected):
  environment = {} if given is None else {"XLA_FLAGS": given}
  cpu_compiler.prepare_environment(environment)
  assert environment == {"XLA_FLAGS": expected}


def test_the_compiler_makes_less_of_a_loop():
  """The compiler ignores unknown names silently, so the effect must be measured."""
  sizes = []
  for flags in ("", OURS):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    run = subprocess.run(
      [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=280, env=environment, check=True
    )
    sizes.append(int(run.stdout))
  usual, ours = sizes
  assert ours < 0.9 * usual
