"""Variables of JAX and XLA that a user has set. Wrong ones end the run with a message, before anything is written."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Mapping

from stepcost import gpus
from trainer.config.errors import ConfigError

# XLA ends the process when it reads wrong flags. It reads them once, so another process has to try them.
_READ_FLAGS = "import os, sys; os.environ['XLA_FLAGS'] = sys.argv[1]; from jaxlib import _jax; _jax.CompileOptions()"
# Attribute of jax.config -> values with which this program cannot work, and the reason.
_REFUSED = {
  "jax_disable_jit": ((True,), "the program compiles its steps before it runs them"),
  "jax_no_tracing": ((True,), "the program traces its steps"),
  "jax_transfer_guard": (("disallow", "disallow_explicit"), "each step copies its batch to the devices"),
  "jax_numpy_rank_promotion": (("raise",), "optax and flax add arrays of different ranks"),
}


def check(environment: Mapping[str, str]) -> None:
  """Raises ConfigError if XLA or JAX refuses a variable of `environment`, or the program cannot work with it."""
  if flags := environment.get("XLA_FLAGS", "").strip():
    _check_flags(flags)
  _check_shares(environment)
  try:
    import jax
  except ValueError as error:
    names = ", ".join(sorted(name for name in environment if name.startswith("JAX_")))
    raise ConfigError(f"JAX refuses a variable of the environment ({names}): {error}.\nCorrect or unset it.") from error
  for name, (values, reason) in _REFUSED.items():
    if (value := getattr(jax.config, name)) in values:
      raise ConfigError(f"{name.upper()}={value}: {reason}.\nUnset this variable of the environment.")


def _check_shares(environment: Mapping[str, str]) -> None:
  given = {name: environment[name] for name in gpus.SHARE_VARIABLES if environment.get(name)}
  if len(given) > 1:
    raise ConfigError(f"{' and '.join(given)} are both set: unset the second one.")
  for name, value in given.items():
    try:
      positive = float(value) > 0
    except ValueError:
      positive = False
    if not positive:
      raise ConfigError(f"{name}={value}: it must be the share of a GPU's memory, a positive number such as 0.75.")


@functools.cache
def _check_flags(flags: str) -> None:
  done = subprocess.run([sys.executable, "-c", _READ_FLAGS, flags], capture_output=True, text=True, check=False)
  if done.returncode:
    lines = [line.partition("] ")[2] for line in done.stderr.splitlines() if line[:1] in "EF" and "] " in line]
    raise ConfigError(f"XLA_FLAGS={flags}: {lines[0] if lines else done.stderr[:300]}\nCorrect or remove this flag.")
