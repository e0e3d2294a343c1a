"""Bytes and seconds of a save: the size of a checkpoint, the grace period that covers one, and the ramdisk."""

from __future__ import annotations

import math

from trainer.checkpoint.ramdisk_size import ramdisk_by_rule
from trainer.config import Config, counts
from trainer.observe.files import LONGEST_WAIT_SECONDS

# Kubernetes' own grace period, which a pod has if nobody asks for another. The head pods that xpk and gcluster make
# for Pathways always have it.
DEFAULT_GRACE_SECONDS = 30
# xpk's shell wrapper looks for a signal every 5 s, and again every 5 s for the end of the program.
XPK_WRAPPER_SECONDS = 10
SAVE_MARGIN = 1.25  # writes to an object store differ in speed
COMMIT_SECONDS = 2  # the commit, the last records, the end of the process
MEBIBYTE = 2**20

_BYTES = {"float32": 4, "bfloat16": 2}


def checkpoint_bytes(config: Config) -> int:
  """Bytes of a checkpoint: weights and AdamW's two moments. Other optimizers have at most this."""
  weight = _BYTES[config.model.weight_dtype]
  first_moment = _BYTES[config.optimizer.mu_dtype or config.model.weight_dtype]
  return counts.parameter_count(config.model) * (weight + first_moment + 4)


def state_bytes(config: Config) -> int:
  """The least bytes of weights and optimizer state: only first moments, and AdamW's second ones."""
  weight = _BYTES[config.model.weight_dtype]
  moment = _BYTES[config.optimizer.mu_dtype or config.model.weight_dtype]
  moments = {"adamw": moment + 4, "muon": moment, "sgd": moment}.get(config.optimizer.opt_type, 0)
  return counts.parameter_count(config.model) * (weight + moments)


def save_seconds(config: Config, hosts: int, gigabytes_per_second: float) -> float:
  """Seconds in which `hosts` hosts write a checkpoint together; 0 if SIGTERM does not save."""
  if not (config.checkpoint.enable_checkpointing and config.checkpoint.enable_autocheckpoint):
    return 0.0
  return checkpoint_bytes(config) / (hosts * gigabytes_per_second * 1e9)


def service_seconds(config: Config) -> float:
  """The longest time for which the end of a process waits for a service that does not answer; 0 without services.

  The checkpoint is committed before. A process that is killed in this time only lacks the exit code 42.
  """
  observe = config.observe
  # The services of the metrics share their time. The writer of goodput is closed after them.
  waits = any(map(observe.sends_to, ("wandb", "gcs_metrics"))) + observe.sends_to("goodput")
  return waits * LONGEST_WAIT_SECONDS


def grace_seconds(save: float, step: float, others: float) -> int:
  """Seconds from SIGTERM to SIGKILL in which a step ends and a save is committed. others: of shells and services."""
  return max(DEFAULT_GRACE_SECONDS, math.ceil(others + step + SAVE_MARGIN * save + COMMIT_SECONDS))


def ramdisk_mebibytes(config: Config, hosts: int, copies: int) -> int:
  """MiB per pod for the emergency tier. hosts: that share a copy of the state; copies: that one pod keeps of it."""
  return math.ceil(copies * ramdisk_by_rule(counts.parameter_count(config.model), hosts) / MEBIBYTE)
