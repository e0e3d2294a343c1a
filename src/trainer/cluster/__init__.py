"""The slices of the run, and which of them are alive. The only package that reads the environment."""

from __future__ import annotations

import os

from trainer.cluster import cpu_compiler
from trainer.cluster.api import Cluster, ProxyLost, View
from trainer.config.errors import ConfigError
from trainer.config.schema import ClusterSection

__all__ = ["Cluster", "ProxyLost", "View", "start"]


def start(cfg: ClusterSection) -> Cluster:
  """Joins or creates this run's JAX world and returns its slices. Call it once, before anything else uses jax.

  Raises ConfigError if this machine or environment cannot provide the cluster, before jax is imported if possible.
  """
  kind = cfg.cluster
  if kind == "auto":
    kind = "pathways" if "proxy" in os.environ.get("JAX_PLATFORMS", "") else "simulated"
  if kind == "multiprocess":
    raise ConfigError(
      "cluster=multiprocess is not available yet: each slice will be its own JAX world. Use cluster=simulated, which "
      "also runs in several processes joined by JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID."
    )
  if kind == "pathways":
    from trainer.cluster.pathways import PathwaysCluster

    return PathwaysCluster.start(cfg, os.environ)
  cpu_compiler.prepare_environment(os.environ)
  from trainer.cluster.simulated import SimulatedCluster

  return SimulatedCluster.start(cfg, os.environ)
