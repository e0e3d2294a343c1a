"""Checkpoints of pytrees of jax.Arrays in three tiers. Start reading at backups.py."""
