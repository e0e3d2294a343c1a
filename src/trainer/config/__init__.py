"""The configuration: schema, YAML + key=value, errors. No JAX here."""

from __future__ import annotations

from trainer.config.errors import ConfigError
from trainer.config.load import load
from trainer.config.schema import Config

__all__ = ["Config", "ConfigError", "load"]
