"""The slices of the run, and which of them are alive. The only package that reads the environment."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from collections.abc import Mapping, MutableMapping

from trainer.cluster import cpu_compiler, launched, torchrun, variables
from trainer.cluster.api import Cluster as Cluster
from trainer.cluster.api import ProxyLost as ProxyLost
from trainer.cluster.api import View as View
from trainer.config.errors import ConfigError
from trainer.config.schema import ClusterSection, ElasticSection
from worlds.membership.run_rules import RunRules
from worlds.place import COMMAND, SUPERVISOR


def check_environment() -> None:
  """Raises ConfigError if variables of JAX or XLA are wrong. Call it before jax is imported."""
  variables.check(os.environ)


def check_devices() -> None:
  """Raises ConfigError if JAX finds no devices. Starts its backend."""
  from trainer.cluster import host_devices

  host_devices.find(os.environ)


def start(cfg: ClusterSection, rules: RunRules | None = None, elastic: ElasticSection | None = None) -> Cluster:
  """Joins or creates this run's JAX world and returns its slices. Call it once, before anything else uses jax.

  rules: of a run that this process may have to supervise, under torchrun. elastic: how slices that are processes
  exchange. Raises ConfigError if this machine or environment cannot provide the cluster, before jax is imported if
  possible.
  """
  kind = _kind(cfg)
  if kind == "pathways":
    from trainer.cluster.pathways import PathwaysCluster

    return PathwaysCluster.start(cfg, os.environ)
  if kind == "multiprocess":
    return _join(cfg, rules, elastic or ElasticSection(), os.environ)
  cpu_compiler.prepare_environment(os.environ)
  from trainer.cluster.simulated import SimulatedCluster

  return SimulatedCluster.start(cfg, os.environ)


def has_worlds(cfg: ClusterSection) -> bool:
  """Whether each slice is a JAX world of its own."""
  return _kind(cfg) == "multiprocess"


def _kind(cfg: ClusterSection) -> str:
  return _find(cfg, os.environ) if cfg.cluster == "auto" else cfg.cluster


def _find(cfg: ClusterSection, environment: Mapping[str, str]) -> str:
  if SUPERVISOR in environment:
    return "multiprocess"
  if "proxy" in environment.get("JAX_PLATFORMS", ""):
    return "pathways"
  if torchrun.RUN_ID in environment and "JAX_NUM_PROCESSES" not in environment:
    # A group of one worker too: it may be what is left of several, and the next group may be larger.
    return "multiprocess" if environment.get("WORLD_SIZE", "1") != "1" or cfg.num_slices > 1 else "simulated"
  return "simulated"


def _join(
  cfg: ClusterSection, rules: RunRules | None, elastic: ElasticSection, environment: MutableMapping[str, str]
) -> Cluster:
  """This process as one of several worlds. If it is the first one of torchrun, it starts the supervisor."""
  worker = None
  if SUPERVISOR not in environment and torchrun.RUN_ID in environment:
    worker = torchrun.TorchrunWorker.read(environment)
    assert rules is not None, "this program does not train"
    place = worker.place(rules.timeout)
  else:
    place = launched.place(environment)
  if cfg.num_slices < 1:
    raise ConfigError(
      f"num_slices={cfg.num_slices}: cluster=multiprocess divides the global batch among num_slices slices for the "
      "life of the run.\nSet num_slices to the number of slices of the full run."
    )
  from worlds.exchange.thread_pool import best_streams  # here: a launcher needs no NumPy

  place = dataclasses.replace(place, streams=best_streams(cfg.num_slices))
  if elastic.exchange_network:
    place = dataclasses.replace(place, host=launched.exchange_host(elastic.exchange_network))
  supervisor = worker.supervise(rules) if worker is not None and rules is not None else None
  cpu_compiler.prepare_environment(environment)
  from trainer.cluster.multiprocess import MultiprocessCluster

  return MultiprocessCluster.start(cfg, place, environment, supervisor)


def job_token(path: str) -> bytes:
  """The token of a job on several hosts, from a file or the environment. Raises ConfigError if there is none."""
  return launched.shared_token(path, os.environ)


def inherited_environment() -> dict[str, str]:
  """A copy of the environment of this process, for processes that it starts."""
  return dict(os.environ)


def run_command() -> str:
  """The command that starts the run of this process again: the launcher's command, or this process's."""
  return os.environ.get(COMMAND) or shlex.join(sys.orig_argv)


def change_environment(changes: Mapping[str, str | None]) -> None:
  """Changes the environment of this process, before `start`. None removes a variable."""
  for name, value in changes.items():
    if value is None:
      os.environ.pop(name, None)
    else:
      os.environ[name] = value
