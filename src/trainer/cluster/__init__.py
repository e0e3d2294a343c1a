"""The slices of the run, and which of them are alive. The only package that reads the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping

from trainer.cluster import cpu_compiler
from trainer.cluster.api import Cluster, ProxyLost, View
from trainer.config.errors import ConfigError
from trainer.config.schema import ClusterSection
from trainer.membership.environment import SUPERVISOR, Place

__all__ = ["Cluster", "ProxyLost", "View", "inherited_environment", "start"]


def start(cfg: ClusterSection) -> Cluster:
  """Joins or creates this run's JAX world and returns its slices. Call it once, before anything else uses jax.

  Raises ConfigError if this machine or environment cannot provide the cluster, before jax is imported if possible.
  """
  kind = _find(os.environ) if cfg.cluster == "auto" else cfg.cluster
  if kind == "pathways":
    from trainer.cluster.pathways import PathwaysCluster

    return PathwaysCluster.start(cfg, os.environ)
  place = Place.read(os.environ) if kind == "multiprocess" else None
  cpu_compiler.prepare_environment(os.environ)
  if place is not None:
    from trainer.cluster.multiprocess import MultiprocessCluster

    return MultiprocessCluster.start(cfg, place, os.environ)
  from trainer.cluster.simulated import SimulatedCluster

  return SimulatedCluster.start(cfg, os.environ)


def _find(environment: Mapping[str, str]) -> str:
  """The kind of cluster that the environment is of. Raises ConfigError for one of several workers of torchrun."""
  if SUPERVISOR in environment:
    return "multiprocess"
  if "proxy" in environment.get("JAX_PLATFORMS", ""):
    return "pathways"
  workers = environment.get("WORLD_SIZE", "1")
  if "TORCHELASTIC_RUN_ID" in environment and workers != "1" and "JAX_NUM_PROCESSES" not in environment:
    # Each worker would train the whole run, and all of them would write into one run folder.
    raise ConfigError(
      f"torchrun started this process as one of WORLD_SIZE={workers} workers: slices that torchrun starts are not "
      "supported.\nStart the run with `python -m trainer.launch.local --slices N config.yml key=value`, on one machine."
    )
  return "simulated"


def inherited_environment(changes: Mapping[str, str]) -> dict[str, str]:
  """The environment of this process with `changes`, for a process that it starts."""
  return dict(os.environ) | dict(changes)
