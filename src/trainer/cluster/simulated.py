"""Slices as equal groups of one JAX world's devices: forced CPU devices on a laptop, or real devices that never fail.

Only faults are simulated, and they look as on Pathways: steps are dispatched as usual. The results of a lost slice are
arrays in error state, which raise a JaxRuntimeError in the thread that waits for them. The results of a hanging slice
are arrays that do not become ready until the hang ends.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from jax.experimental import transfer

from trainer import world as world_lib
from trainer.cluster import host_devices, joined_processes
from trainer.cluster.api import Cluster, FaultTarget, View
from trainer.config.errors import ConfigError
from trainer.config.schema import ClusterSection
from trainer.world import World


class SimulatedCluster(Cluster):
  """One JAX world cut into slices, which faults can take away and give back."""

  kind = "simulated"
  poll_seconds = 0.01

  def __init__(
    self,
    slices: Mapping[int, tuple[jax.Device, ...]],
    world: World | None = None,
    *,
    replacement_seconds: float = 1.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
  ) -> None:
    """replacement_seconds: how long the simulated scheduler takes to replace a slice that the run waits for."""
    super().__init__(slices, world or world_lib.SingleWorld(), clock=clock, sleep=sleep)
    self._replacement_seconds = replacement_seconds
    self._down: dict[int, float | None] = {}  # dead or hanging slice -> time of its return; None: when waited for
    self._hanging: set[int] = set()  # slices of `_down` that hang
    self._pending = _PendingArrays()
    self._lock = threading.RLock()

  @classmethod
  def start(cls, cfg: ClusterSection, environment: Mapping[str, str]) -> SimulatedCluster:
    """Joins the processes that the environment names, forces host devices on a CPU, and groups the devices."""
    process_count = joined_processes.join(cfg, environment)
    wanted = max(cfg.num_slices, 1) * max(cfg.devices_per_slice, 1)
    host_devices.force(wanted, process_count, environment)
    return cls(_group(cfg, host_devices.find(environment)), world_lib.of_jax())

  @property
  def fault_target(self) -> FaultTarget:
    return self

  def lose(self, slice_id: int, seconds: float | None = None) -> None:
    """The slice dies. It returns after `seconds`; None: when `give_back` is called or the run waits for it."""
    with self._lock:
      self._go_down(slice_id, seconds)
      self._hanging.discard(slice_id)
      self._record_deaths([slice_id])

  def hang(self, slice_id: int, seconds: float | None = None) -> None:
    """The slice stops answering: what is computed on it is never ready, and it fails health checks. When the hang ends,
    after `seconds` or with `give_back`, its memory is intact. `wait_for` replaces a slice that was given up
    (`lost`)."""
    with self._lock:
      self._go_down(slice_id, seconds)
      self._hanging.add(slice_id)

  def give_back(self, slice_id: int) -> None:
    """A dead slice returns with empty memory; a hanging one goes on."""
    assert slice_id in self.slices, f"no slice {slice_id} among {sorted(self.slices)}"
    with self._lock:
      self._return([slice_id])

  def alive(self) -> frozenset[int]:
    with self._lock:
      now = self._clock()
      self._return([i for i, when in self._down.items() if when is not None and when <= now])
      return frozenset(self.slices) - frozenset(self._down) - self._barred

  def lost(self, view: View, named: Iterable[int] = ()) -> frozenset[int]:
    lost = super().lost(view, named)
    # The run drops the results of a slice that it gives up. They must become ready: on a CPU, programs on several
    # devices run in the order of their dispatch, and programs of the next attempt would wait for them.
    with self._lock:
      if self._hanging & lost:
        self._pending.release()
    return lost

  def _replace_lost(self) -> None:
    with self._lock:
      at = self._clock() + self._replacement_seconds  # one time for all: otherwise a run could go on with some of them
      for slice_id, when in self._down.items():
        if when is None:
          self._down[slice_id] = at

  def returned(self, view: View) -> frozenset[int]:
    return self.alive() - frozenset(view.slices)

  def on_slices(self, compute: Callable[..., Any], view: View) -> Callable[..., Any]:
    return lambda *arguments: compute(*arguments[:-1], self.poison(arguments[-1], view))

  def poison(self, batch: Any, view: View) -> Any:
    """The batch. If a slice of `view` is down: arrays that fail, or never become ready, in its place."""
    with self._lock:
      down = frozenset(view.slices) - self.alive() | self.died(view)
      if not down:
        return batch
      if down - self._hanging:
        # Every shard must fail: if only some did, the living devices would wait in the collective for ever.
        message = f"DATA_LOSS: simulated loss of slices {sorted(down)}"
        return jax.tree.map(lambda a: transfer.make_error_array(_aval(a), message), batch)
      pending = jax.tree.map(self._pending.add, batch)
    threading.Thread(target=self._wait_for_end_of_hang, name="simulated-hang", daemon=True).start()
    return pending

  def stop(self) -> None:
    self._pending.release()
    if self.world.size > 1:
      jax.distributed.shutdown()

  def _go_down(self, slice_id: int, seconds: float | None) -> None:
    assert slice_id in self.slices, f"no slice {slice_id} among {sorted(self.slices)}"
    self._down[slice_id] = None if seconds is None else self._clock() + seconds

  def _return(self, slice_ids: list[int]) -> None:
    for slice_id in slice_ids:
      self._down.pop(slice_id, None)
      self._hanging.discard(slice_id)
    if not self._hanging:
      self._pending.release()

  def _wait_for_end_of_hang(self) -> None:
    """Ends hangs whose time is over. The training thread cannot do it: it waits for the arrays."""
    while self._hanging:
      self.alive()
      time.sleep(self.poll_seconds)


class _PendingArrays:
  """Copies of arrays that are not ready before `release`: they are pulled from a server that delays its answer."""

  def __init__(self) -> None:
    self._server: Any = None
    self._waiting: dict[int, jax.Array] = {}  # by the id of the pull
    self._ids = itertools.count()

  def add(self, array: jax.Array) -> jax.Array:
    """A copy of `array` with the same sharding, ready after `release`."""
    if self._server is None:
      local = "127.0.0.1:0"
      self._server = transfer.start_transfer_server(next(iter(array.devices())).client, local, [local])
      self._connection = self._server.connect(self._server.address())
    pull = next(self._ids)
    self._waiting[pull] = array
    return self._connection.pull(pull, _aval(array))

  def release(self) -> None:
    while self._waiting:
      self._server.await_pull(*self._waiting.popitem())


def _aval(array: jax.Array) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def _group(cfg: ClusterSection, devices: list[jax.Device]) -> dict[int, tuple[jax.Device, ...]]:
  """Returns {slice id: devices}: the hardware's own slices if it has several, otherwise equal contiguous groups."""
  by_index: dict[int, list[jax.Device]] = {}
  for device in devices:
    by_index.setdefault(getattr(device, "slice_index", 0), []).append(device)
  if len(by_index) > 1:
    if cfg.num_slices not in (0, len(by_index)):
      raise ConfigError(f"num_slices={cfg.num_slices}, but the devices are in {len(by_index)} slices; leave it at 0")
    return {i: tuple(group) for i, group in by_index.items()}

  num_slices = max(cfg.num_slices, 1)
  per_slice = cfg.devices_per_slice or len(devices) // num_slices
  wanted = num_slices * per_slice
  several_processes = len({device.process_index for device in devices}) > 1
  if per_slice == 0 or wanted > len(devices) or (several_processes and wanted != len(devices)):
    others = (
      f"or the number of devices that XLA_FLAGS or JAX_NUM_CPU_DEVICES forces (a CPU plays at most {host_devices.MOST})"
      if devices[0].platform == "cpu"
      else "or set JAX_PLATFORMS=cpu to let the CPU play all devices"
    )
    raise ConfigError(
      f"num_slices={num_slices} x devices_per_slice={cfg.devices_per_slice or 'any'} does not fit the {len(devices)} "
      f"{devices[0].platform} devices of this run; change one of them, {others}"
    )
  if cfg.devices_per_slice == 0 and wanted != len(devices):
    raise ConfigError(
      f"{len(devices)} {devices[0].platform} devices cannot be cut into num_slices={num_slices} equal slices; change "
      "num_slices, or set devices_per_slice to leave some devices out"
    )
  return {i: tuple(devices[i * per_slice : (i + 1) * per_slice]) for i in range(num_slices)}
