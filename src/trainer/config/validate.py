"""Checks between keys, before any device or byte is touched. Each failure is one message: value, rule, remedy."""

from __future__ import annotations

from trainer.config.errors import ConfigError
from trainer.config.schema import Config


def check(config: Config) -> None:
  """ConfigError for the first combination of values that cannot work or can have no effect."""
  scale = config.model.global_parameter_scale
  if scale & (scale - 1):
    raise ConfigError(f"global_parameter_scale={scale}: must be a power of two.\nUse {1 << (scale.bit_length() - 1)}.")


def check_paths(config: Config) -> None:
  """ConfigError when an output folder cannot be written or a data path holds nothing usable. Creates nothing."""
