"""Several processes that are one JAX world: who they are, from the variables of TPU hosts, JAX, Kubernetes or Slurm."""

from __future__ import annotations

from collections.abc import Mapping

import jax

from trainer.config.errors import ConfigError
from trainer.config.schema import ClusterSection

_JAX = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_COMPLETION_INDEX = "JOB_COMPLETION_INDEX"  # of a pod of an indexed Kubernetes Job, a JobSet for example
# What `srun` sets, and JAX's detection needs. A script of sbatch, outside of srun, has no step.
_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
_SLURM_TASKS_PER_NODE = "SLURM_STEP_TASKS_PER_NODE"


def join(cfg: ClusterSection, environment: Mapping[str, str]) -> int:
  """Joins jax.distributed if the environment names peers. Returns how many processes share the host devices. Raises
  ConfigError if the variables do not fit each other."""
  heartbeat = cfg.jax_distributed_heartbeat_timeout_seconds
  if "," in environment.get("TPU_WORKER_HOSTNAMES", "") or "MEGASCALE_COORDINATOR_ADDRESS" in environment:
    # TPU hosts of one or several slices: jax finds the peers by itself.
    jax.distributed.initialize(heartbeat_timeout_seconds=heartbeat)
    return 1
  given = {name: environment[name] for name in _JAX if environment.get(name)}
  if not given:
    return _join_slurm(cfg, environment)
  if index := environment.get(_COMPLETION_INDEX):
    given.setdefault("JAX_PROCESS_ID", index)
  if len(given) != len(_JAX) or not (given[_JAX[1]].isdecimal() and given[_JAX[2]].isdecimal()):
    raise ConfigError(
      f"the environment has {given}; several processes need all of {', '.join(_JAX)} (host:port and two numbers). Set "
      "all of them, or none for one process."
    )
  count, index_of_process = int(given[_JAX[1]]), int(given[_JAX[2]])
  if not 0 <= index_of_process < count:
    raise ConfigError(f"JAX_PROCESS_ID={index_of_process} must be from 0 to JAX_NUM_PROCESSES-1 = {count - 1}.")
  _refuse_single_controller(cfg, "JAX_NUM_PROCESSES", count)
  if count > 1:
    jax.distributed.initialize(
      given[_JAX[0]],
      count,
      index_of_process,
      cluster_detection_method="deactivate",  # within Slurm it would leave each process only one GPU
      heartbeat_timeout_seconds=heartbeat,
    )
  return count


def _join_slurm(cfg: ClusterSection, environment: Mapping[str, str]) -> int:
  """Joins the other tasks of a Slurm step, found by JAX. Returns their number; 1 if there are none."""
  if not all(environment.get(name) for name in _SLURM) or environment["SLURM_NTASKS"] == "1":
    return 1
  count = int(environment["SLURM_NTASKS"])
  _refuse_single_controller(cfg, "SLURM_NTASKS", count)
  jax.distributed.initialize(heartbeat_timeout_seconds=cfg.jax_distributed_heartbeat_timeout_seconds)
  if _one_task_per_node(environment.get(_SLURM_TASKS_PER_NODE, "")):
    # JAX's detection has given this process the GPU with the number SLURM_LOCALID only.
    jax.config.update("jax_cuda_visible_devices", "all")
    jax.config.update("jax_rocm_visible_devices", "all")
  return count


def _one_task_per_node(counts: str) -> bool:
  """Whether all nodes have one task. counts: such as "2(x3),1": three nodes with two tasks, then one with one."""
  return {part.partition("(")[0] for part in counts.split(",")} == {"1"}


def _refuse_single_controller(cfg: ClusterSection, name: str, count: int) -> None:
  if cfg.enable_single_controller and count > 1:
    raise ConfigError(f"enable_single_controller=true means one process, but {name}={count}. Remove one.")
