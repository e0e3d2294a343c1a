"""Slices as equal groups of one JAX world's devices: forced CPU devices on a laptop, or real ones that never fail.

Only faults are simulated. A lost slice shows as it does on Pathways: the step is dispatched as usual, and its results
are arrays in error state, which raise a JaxRuntimeError where somebody waits for them.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.experimental import transfer

from trainer import world as world_lib
from trainer.cluster.api import Cluster, View
from trainer.config.schema import ClusterSection
from trainer.world import World

_POLL_SECONDS = 0.01
# Forced on one process. Five thousand take most of a minute to make, and then more threads than the system grants.
MAX_HOST_DEVICES = 512
_MARK = "simulated loss of slice"


class SimulatedCluster(Cluster):
  """One JAX world cut into slices that can be lost and given back."""

  kind = "simulated"

  def __init__(
    self,
    slices: Mapping[int, tuple[jax.Device, ...]],
    world: World | None = None,
    *,
    replacement_seconds: float = 1.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
  ) -> None:
    """replacement_seconds: how long the simulated scheduler takes to replace a slice that is waited for."""
    super().__init__(slices, world or world_lib.SingleWorld())
    self._replacement_seconds = replacement_seconds
    self._clock = clock
    self._sleep = sleep
    self._lost: dict[int, float | None] = {}  # slice -> when it returns by itself; None: when it is waited for
    self._deaths = dict.fromkeys(self.slices, 0)
    self._hung: set[int] = set()
    self._resume_hung = threading.Event()
    self._lock = threading.Lock()

  @classmethod
  def start(cls, cfg: ClusterSection, environment: Mapping[str, str]) -> SimulatedCluster:
    """Joins the processes that the environment names, forces host devices on a CPU, and groups the devices."""
    process_count = _join_processes(cfg, environment)
    _force_host_devices(cfg, environment, process_count)
    return cls(_group(cfg, _all_devices(environment)), world_lib.of_jax())

  def lose(self, slice_id: int, seconds: float | None = None) -> None:
    """The slice dies. It returns after `seconds`, or (None) once `give_back` is called or somebody waits for it."""
    assert slice_id in self.slices, f"no slice {slice_id} among {sorted(self.slices)}"
    with self._lock:
      self._lost[slice_id] = None if seconds is None else self._clock() + seconds
      self._deaths[slice_id] += 1

  def hang(self, slice_id: int, seconds: float | None = None) -> None:
    """The slice stops answering: steps on it never finish, and the health check misses it."""
    self.lose(slice_id, seconds)
    with self._lock:
      self._hung.add(slice_id)
      self._resume_hung = threading.Event()

  def give_back(self, slice_id: int) -> None:
    """The slice lives again, with empty memories."""
    assert slice_id in self.slices, f"no slice {slice_id} among {sorted(self.slices)}"
    with self._lock:
      self._return([slice_id])

  def alive(self) -> frozenset[int]:
    with self._lock:
      now = self._clock()
      self._return([i for i, when in self._lost.items() if when is not None and when <= now])
      return frozenset(self.slices) - frozenset(self._lost)

  def wait_for(self, count: int, timeout: float, stop: Callable[[], bool] = lambda: False) -> frozenset[int]:
    start = self._clock()
    alive = self.alive()
    while len(alive) < count and not stop():
      with self._lock:
        for slice_id, when in self._lost.items():
          if when is None:
            self._lost[slice_id] = start + self._replacement_seconds
      if self._clock() - start >= timeout:
        raise TimeoutError(
          f"waited {timeout:g} s for {count} slices; only {sorted(alive)} of {sorted(self.slices)} are alive. "
          "Raise elastic_timeout_seconds, or let the run go on with fewer by elastic_min_slice_count."
        )
      self._sleep(_POLL_SECONDS)
      alive = self.alive()
    return alive

  def deaths(self, slice_id: int) -> int:
    return self._deaths[slice_id]

  def returned(self, view: View) -> frozenset[int]:
    return self.alive() - frozenset(view.slices)

  def is_slice_loss(self, error: BaseException) -> bool:
    return isinstance(error, jax.errors.JaxRuntimeError) and f"DATA_LOSS: {_MARK}" in str(error)

  def poison(self, batch: Any, view: View) -> Any:
    down = sorted(frozenset(view.slices) - self.survivors(view) - self._hung)
    if not down:
      return batch
    # Every shard must fail: with a part of them the living devices would wait in the collective for ever.
    message = f"DATA_LOSS: {_MARK} {down}"
    return jax.tree.map(lambda a: transfer.make_error_array(_aval(a), message), batch)

  def block_until_ready(self, arrays: Any, view: View) -> None:
    with self._lock:
      hung, resume = self._hung & set(view.slices), self._resume_hung
    if hung:
      resume.wait()
      raise RuntimeError(f"slices {sorted(hung)} had stopped answering")
    jax.block_until_ready(arrays)

  def stop(self) -> None:
    self._resume_hung.set()
    if self.world.size > 1:
      jax.distributed.shutdown()

  def _return(self, slice_ids: list[int]) -> None:
    for slice_id in slice_ids:
      self._lost.pop(slice_id, None)
      if slice_id in self._hung:
        self._hung.discard(slice_id)
        self._resume_hung.set()


def _aval(array: jax.Array) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def _join_processes(cfg: ClusterSection, environment: Mapping[str, str]) -> int:
  """Joins jax.distributed when the environment names peers. Returns how many processes share the host devices."""
  if "," in environment.get("TPU_WORKER_HOSTNAMES", "") or "MEGASCALE_COORDINATOR_ADDRESS" in environment:
    # TPU hosts of one or several slices: jax finds the peers by itself.
    jax.distributed.initialize(heartbeat_timeout_seconds=cfg.jax_distributed_heartbeat_timeout_seconds)
    return 1
  names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
  given = {name: environment[name] for name in names if environment.get(name)}
  if not given:
    return 1
  if len(given) != len(names) or not (given[names[1]].isdecimal() and given[names[2]].isdecimal()):
    raise ValueError(
      f"the environment has {given}; several processes need all of {', '.join(names)} (host:port and two numbers), one "
      "process none of them"
    )
  count, index = int(given[names[1]]), int(given[names[2]])
  if not 0 <= index < count:
    raise ValueError(f"JAX_PROCESS_ID={index} must be from 0 to JAX_NUM_PROCESSES-1 = {count - 1}")
  if cfg.enable_single_controller and count > 1:
    raise ValueError(f"enable_single_controller=true means one process, but JAX_NUM_PROCESSES={count}; drop either")
  if count > 1:
    jax.distributed.initialize(
      given[names[0]], count, index, heartbeat_timeout_seconds=cfg.jax_distributed_heartbeat_timeout_seconds
    )
  return count


def _force_host_devices(cfg: ClusterSection, environment: Mapping[str, str], process_count: int) -> None:
  """Gives the CPU backend the devices that cfg asks for, unless the user has forced a number of them already.

  Does nothing to other backends, whose real slices may be larger than what a CPU can play; on a CPU `_group` refuses
  those.
  """
  if _forced_by_user(environment):
    return
  wanted = max(cfg.num_slices, 1) * max(cfg.devices_per_slice, 1)
  if wanted % process_count:
    raise ValueError(
      f"num_slices x devices_per_slice = {wanted} devices must divide by JAX_NUM_PROCESSES={process_count}; change one"
    )
  if wanted // process_count <= MAX_HOST_DEVICES:
    jax.config.update("jax_num_cpu_devices", wanted // process_count)


def _forced_by_user(environment: Mapping[str, str]) -> bool:
  flag = re.search(r"--xla_force_host_platform_device_count=(\d+)", environment.get("XLA_FLAGS", ""))
  return flag is not None or jax.config.jax_num_cpu_devices > 0


def _all_devices(environment: Mapping[str, str]) -> list[jax.Device]:
  try:
    return jax.devices()
  except RuntimeError as error:  # no backend starts: the platform is misspelt, has no device here, or no package
    raise ValueError(
      f"JAX_PLATFORMS={environment.get('JAX_PLATFORMS', '')!r}: JAX finds no devices: {str(error).splitlines()[0]}\n"
      "Set JAX_PLATFORMS=cpu to run on the CPU, or install JAX for this machine's accelerator (setup.sh --gpu, --tpu)."
    ) from error


def _group(cfg: ClusterSection, devices: list[jax.Device]) -> dict[int, tuple[jax.Device, ...]]:
  """Slice id -> its devices: the hardware's own slices where it has several, else equal contiguous groups."""
  by_index: dict[int, list[jax.Device]] = {}
  for device in devices:
    by_index.setdefault(getattr(device, "slice_index", 0), []).append(device)
  if len(by_index) > 1:
    if cfg.num_slices not in (0, len(by_index)):
      raise ValueError(f"num_slices={cfg.num_slices}, but the devices are in {len(by_index)} slices; leave it at 0")
    return {i: tuple(group) for i, group in by_index.items()}

  num_slices = max(cfg.num_slices, 1)
  per_slice = cfg.devices_per_slice or len(devices) // num_slices
  wanted = num_slices * per_slice
  several_processes = len({device.process_index for device in devices}) > 1
  if per_slice == 0 or wanted > len(devices) or (several_processes and wanted != len(devices)):
    raise ValueError(
      f"num_slices={num_slices} x devices_per_slice={cfg.devices_per_slice or 'any'} does not fit the {len(devices)} "
      f"{devices[0].platform} devices of this run; change one of them, or the number of devices that XLA_FLAGS or "
      f"JAX_NUM_CPU_DEVICES forces (a CPU plays at most {MAX_HOST_DEVICES})"
    )
  if cfg.devices_per_slice == 0 and wanted != len(devices):
    raise ValueError(
      f"{len(devices)} {devices[0].platform} devices cannot be cut into num_slices={num_slices} equal slices; change "
      "num_slices, or set devices_per_slice to leave some devices out"
    )
  return {i: tuple(devices[i * per_slice : (i + 1) * per_slice]) for i in range(num_slices)}
