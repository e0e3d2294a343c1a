"""Several processes that are one JAX world: who they are, from the variables of TPU hosts, JAX, Kubernetes or Slurm."""

from __future__ import annotations

import errno
import os
import socket
import sys
import threading
from collections.abc import Mapping
from typing import Any

import jax

from trainer.config.errors import ConfigError
from trainer.config.schema import ClusterSection
from worlds import addresses, lines
from worlds.peers import RunEnded

_JAX = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_BIND_ADDRESS = "JAX_COORDINATOR_BIND_ADDRESS"
_COMPLETION_INDEX = "JOB_COMPLETION_INDEX"  # of a pod of an indexed Kubernetes Job, a JobSet for example
# What `srun` sets, and JAX's detection needs. A script of sbatch, outside of srun, has no step.
_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
_SLURM_TASKS_PER_NODE = "SLURM_STEP_TASKS_PER_NODE"
_LIMIT_SECONDS = 300.0  # of a wait for the other processes, as in JAX
_POLL_SECONDS, _PROBE_SECONDS = 0.5, 2.0
_FAILED = 1  # exit code


def initialize(who: str, others: str, *, remedy: str, address: str = "", **arguments: Any) -> None:
  """jax.distributed.initialize. Tells of a long wait, and ends this process with 1 and a message if it takes too long:
  JAX would be silent for five minutes, and then abort. who waits for `others`, such as "task 0 of 4" and "3 others".
  remedy: if they do not come. address: of the coordinator; "": JAX finds it. Raises RunEnded if its port is in use."""
  joined, others = threading.Event(), f"{others} at {address}" if address else others
  coordinates = arguments.get("process_id", 0) == 0
  if address and coordinates and _BIND_ADDRESS not in os.environ:
    _check_port(address)

  def reason() -> str:
    return "" if coordinates else _reason(address)

  def watch() -> None:
    patience = lines.Patience()
    while not joined.wait(_POLL_SECONDS):
      if patience.seconds >= _LIMIT_SECONDS:
        text = f"error: {who} has waited {_LIMIT_SECONDS:g} s for {others}{reason()}.\n{remedy}"
        print(text, file=sys.stderr, flush=True)
        os._exit(_FAILED)  # the main thread cannot leave JAX
      patience.waits(lambda: f"{who} waits for {others}, for {_LIMIT_SECONDS:g} s at most{reason()}")

  threading.Thread(target=watch, name="waits for other processes", daemon=True).start()
  try:
    jax.distributed.initialize(address or None, initialization_timeout=int(2 * _LIMIT_SECONDS), **arguments)
  finally:
    joined.set()


def _reason(address: str) -> str:
  """Why no coordinator can be reached; "" if something listens there."""
  try:
    socket.create_connection(addresses.split(address), _PROBE_SECONDS).close()
  except OSError as error:
    return f": {error}"
  return ""


def _check_port(address: str) -> None:
  """Raises RunEnded if another process listens on this port: JAX would crash."""
  _, port = addresses.split(address)
  try:
    socket.create_server(("", port)).close()
  except OSError as error:
    if error.errno == errno.EADDRINUSE:
      text = f"error: {address}: another process of this host uses the port.\nEnd it, or choose another port."
      raise RunEnded(_FAILED, text) from error


def join(cfg: ClusterSection, environment: Mapping[str, str]) -> int:
  """Joins jax.distributed if the environment names peers. Returns how many processes share the host devices. Raises
  ConfigError if the variables do not fit each other."""
  if "," in environment.get("TPU_WORKER_HOSTNAMES", "") or "MEGASCALE_COORDINATOR_ADDRESS" in environment:
    # TPU hosts of one or several slices: jax finds the peers by itself.
    remedy = "Start the command on all hosts of the slices."
    initialize("This host", "the other TPU hosts", remedy=remedy)
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
  try:
    addresses.split(given[_JAX[0]])
  except ValueError as error:
    raise ConfigError(f"JAX_COORDINATOR_ADDRESS={given[_JAX[0]]}: {error}.") from error
  if count > 1:
    initialize(
      f"task {index_of_process} of {count}",
      _others(count),
      remedy=f"Start all {count} processes, with JAX_PROCESS_ID from 0 to {count - 1} and the same "
      "JAX_COORDINATOR_ADDRESS, which is on the host of process 0. For one process unset these variables.",
      address=given[_JAX[0]],
      num_processes=count,
      process_id=index_of_process,
      cluster_detection_method="deactivate",  # within Slurm it would leave each process only one GPU
    )
  return count


def _others(count: int) -> str:
  return f"{count - 1} other{'s' * (count > 2)}"


def _join_slurm(cfg: ClusterSection, environment: Mapping[str, str]) -> int:
  """Joins the other tasks of a Slurm step, found by JAX. Returns their number; 1 if there are none."""
  if not all(environment.get(name) for name in _SLURM) or environment["SLURM_NTASKS"] == "1":
    return 1
  count = int(environment["SLURM_NTASKS"])
  _refuse_single_controller(cfg, "SLURM_NTASKS", count)
  initialize(
    f"task {environment['SLURM_PROCID']} of {count}",
    _others(count),
    remedy=f"SLURM_NTASKS={count}: start all tasks with `srun python -m trainer ...`, and look at their logs. For one "
    "process, use `srun --ntasks=1`, or unset SLURM_NTASKS.",
  )
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
