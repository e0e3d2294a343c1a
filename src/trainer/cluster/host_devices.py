"""The devices of this process: real ones, or devices that are forced on the CPU."""

from __future__ import annotations

import re
from collections.abc import Mapping

import jax

from trainer.config.errors import ConfigError

# Forced on one process. Five thousand take most of a minute to create, and more threads than the system allows.
MOST = 512


def force(wanted: int, process_count: int, environment: Mapping[str, str]) -> None:
  """Gives the CPU backends of `process_count` processes `wanted` devices together, unless the user has forced a number
  or they are more than a CPU can simulate. Other backends are not changed."""
  flag = re.search(r"--xla_force_host_platform_device_count=(\d+)", environment.get("XLA_FLAGS", ""))
  if flag is not None or jax.config.jax_num_cpu_devices > 0:
    return
  if wanted % process_count:
    raise ConfigError(
      f"the {wanted} devices that num_slices and devices_per_slice ask for must divide by the {process_count} "
      "processes that share them; change one"
    )
  if wanted // process_count <= MOST:
    jax.config.update("jax_num_cpu_devices", wanted // process_count)


def find(environment: Mapping[str, str]) -> list[jax.Device]:
  """The devices of this JAX world. Raises ConfigError if no backend starts."""
  try:
    return jax.devices()
  # It is misspelled, has no device here, or is not installed: JAX asserts that a known name has a plugin.
  except (RuntimeError, AssertionError) as error:
    reason = (str(error) or "the backend is not installed").splitlines()[0]
    raise ConfigError(
      f"JAX_PLATFORMS={environment.get('JAX_PLATFORMS', '')!r}: JAX finds no devices: {reason}\n"
      "Set JAX_PLATFORMS=cpu to run on the CPU, or install JAX for this machine's accelerator (setup.sh --gpu, --tpu)."
    ) from error
