"""The slices of the run, and which of them are alive. The only package that reads the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping

from trainer.cluster import cpu_compiler
from trainer.cluster.api import Cluster, ProxyLost, View
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
  """The kind of cluster that the environment is of."""
  if SUPERVISOR in environment:
    return "multiprocess"
  return "pathways" if "proxy" in environment.get("JAX_PLATFORMS", "") else "simulated"


def inherited_environment(changes: Mapping[str, str]) -> dict[str, str]:
  """The environment of this process with `changes`, for a process that it starts."""
  return dict(os.environ) | dict(changes)
