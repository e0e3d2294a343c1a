"""Slices as separate JAX worlds: this process has the devices of its own slice, and exchanges sums with the others.

Nothing that another slice does enters XLA. A launcher (trainer.launch) starts the processes and says in the environment
where the supervisor is and who this process is.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping

import jax
from jax import Device

from trainer import world as world_lib
from trainer.cluster import host_devices
from trainer.cluster.api import Cluster, FaultTarget, View
from trainer.cluster.torchrun import ChildSupervisor
from trainer.config.schema import ClusterSection
from trainer.world import World
from worlds.join import join
from worlds.peers import Peers
from worlds.place import Place

_REPORT_SECONDS = 5.0  # that the primary may need to report an error, and to end
BAD_INPUT = 2  # exit code


class MultiprocessCluster(Cluster):
  """This process's slice, and its place among the members of the run."""

  kind = "multiprocess"
  recovers_in_process = False  # a lost slice is a lost process; the others lose nothing and need no new attempt
  peers: Peers

  def __init__(
    self,
    devices: tuple[Device, ...],
    num_slices: int,
    world: World,
    peers: Peers,
    place: Place,
    supervisor: ChildSupervisor | None,
  ) -> None:
    """num_slices: shares of the global batch, and the most members that compute at a time. supervisor: if this process
    has started it."""
    super().__init__({peers.member: devices}, world)
    self._num_slices = num_slices
    self.peers = peers
    self.fresh_run_id = peers.run_id
    self._place, self._supervisor = place, supervisor
    self._launcher = os.getppid()

  @classmethod
  def start(
    cls,
    cfg: ClusterSection,
    place: Place,
    environment: Mapping[str, str],
    supervisor: ChildSupervisor | None = None,
  ) -> MultiprocessCluster:
    """Joins the run at `place`. Raises RunEnded if no supervisor answers there, or if it does not let this process
    join."""
    _join_slice(cfg, environment, place)
    world = world_lib.of_jax()
    peers = join(place)
    return cls(tuple(host_devices.find(environment)), cfg.num_slices, world, peers, place, supervisor)

  @property
  def num_slices(self) -> int:
    return self._num_slices

  @property
  def fault_target(self) -> FaultTarget | None:
    return self if self._place.can_rehearse else None

  def lose(self, slice_id: int, seconds: float | None = None) -> None:
    """The supervisor kills the member's processes."""
    self._fault("lose", slice_id, seconds)

  def hang(self, slice_id: int, seconds: float | None = None) -> None:
    """The supervisor stops the member's processes."""
    self._fault("hang", slice_id, seconds)

  def give_back(self, slice_id: int) -> None:
    """The supervisor starts the member's processes, or lets them continue."""
    self._fault("give_back", slice_id, None)

  def _fault(self, action: str, target: int, seconds: float | None) -> None:
    self.peers.membership.send("fault", action=action, target=target, seconds=seconds)

  @property
  def stop_agreed(self) -> Callable[[], bool]:
    return lambda: self.peers.stopping or self.peers.left

  @property
  def is_primary(self) -> bool:
    return self.peers.is_primary

  def saves_in_storage(self) -> bool:
    return self.peers.saves_in_storage

  def on_role(self, callback: Callable[[bool], None]) -> None:
    self.peers.on_role.append(callback)

  def view(self, alive: object = None) -> View:
    """The view of every attempt: this process's own slice. Its program computes one share."""
    ((member, devices),) = self.slices.items()
    return View((member,), (devices,), 1, (0,))

  def alive(self) -> frozenset[int]:
    return frozenset(self.slices)

  def wait_for(self, count: int, timeout: float, stop: Callable[[], bool] = lambda: False) -> frozenset[int]:
    return self.alive()

  def returned(self, view: View) -> frozenset[int]:
    return frozenset()

  def watch(self, *, busy: Callable[[], str], noticed: Callable[[], bool], unsupervised: Callable[[], None]) -> None:
    def leaves() -> bool:
      if not noticed() and os.getppid() == self._launcher:
        return False
      if self._supervisor is not None:
        self._supervisor.stop()  # it ends with this process, so the others save and end as well
      return True

    self.peers.membership.watch(busy=busy, noticed=leaves, lost=unsupervised)

  def finished(self, code: int) -> None:
    self.peers.finished(code)

  def is_reported(self) -> bool:
    # The primary waits a little too: it stays the primary while the others join.
    seconds = _REPORT_SECONDS / 5 if self.peers.is_primary else _REPORT_SECONDS
    return self.peers.wait_for_code(seconds) == BAD_INPUT

  def stop(self) -> None:
    self.peers.membership.close()
    self.peers.exchange.close()
    if self._supervisor is not None:
      self._supervisor.close(over=self.peers.ended is not None)
    if self.world.size > 1:
      with contextlib.suppress(RuntimeError):  # another process of the slice has died
        jax.distributed.shutdown()


def _join_slice(cfg: ClusterSection, environment: Mapping[str, str], place: Place) -> None:
  """Chooses the devices of this process, and joins the other processes of the slice."""
  if place.gpu is not None:
    jax.config.update("jax_cuda_visible_devices", str(place.gpu))
  host_devices.force(max(cfg.devices_per_slice, 1), place.lanes, environment)
  if place.lanes > 1:
    jax.distributed.initialize(
      place.slice_coordinator,
      place.lanes,
      place.lane,
      cluster_detection_method="deactivate",  # within Slurm it would leave each process only one GPU
      heartbeat_timeout_seconds=cfg.jax_distributed_heartbeat_timeout_seconds,
    )
