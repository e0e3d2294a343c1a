"""Checkpoints of pytrees of jax.Arrays in three tiers. Start reading at tiers.py. Importing this imports no Orbax."""

from trainer.checkpoint.backup import Restored
from trainer.checkpoint.errors import CheckpointError, ConfigMismatch, NoGoodCheckpoint, NonFiniteState
from trainer.checkpoint.tiers import Tiers

__all__ = ["CheckpointError", "ConfigMismatch", "NoGoodCheckpoint", "NonFiniteState", "Restored", "Tiers"]
