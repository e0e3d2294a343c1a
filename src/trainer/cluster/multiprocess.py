"""Slices as separate JAX worlds: this process has the devices of its own slice, and exchanges sums with the others.

Nothing that another slice does enters XLA. A launcher (trainer.launch) starts the processes and says in the environment
where the supervisor is and who this process is.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping

import jax
import jaxlib
from jax import Device

from trainer import world as world_lib
from trainer.cluster import host_devices, joined_processes
from trainer.cluster.api import Cluster, FaultTarget, View
from trainer.cluster.torchrun import ChildSupervisor
from trainer.config.schema import ClusterSection
from trainer.observe.environment import cpu_model
from trainer.world import World
from worlds.exit_codes import BAD_INPUT
from worlds.join import join
from worlds.peers import Peers
from worlds.place import Place

_REPORT_SECONDS = 5.0  # that the primary may need to report an error, and to end


class MultiprocessCluster(Cluster):
  """This process's slice, and its place among the members of the run."""

  kind = "multiprocess"
  recovers_in_process = False

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
    self.peers, self._num_slices, self._place, self._supervisor = peers, num_slices, place, supervisor
    self.launch_id, self.joins = peers.run_id, peers.begun
    self._launcher = os.getppid()

  @classmethod
  def start(
    cls, cfg: ClusterSection, place: Place, environment: Mapping[str, str], supervisor: ChildSupervisor | None = None
  ) -> MultiprocessCluster:
    """Joins the run at `place`. Raises RunEnded if no supervisor answers there, or if it refuses this process."""
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

  def view(self, alive: object = None) -> View:
    """The view of every attempt: this process's own slice. Its program computes one share."""
    ((member, devices),) = self.slices.items()
    return View((member,), (devices,), 1, (0,))

  def alive(self) -> frozenset[int]:
    return frozenset(self.slices)

  def returned(self, view: View) -> frozenset[int]:
    return frozenset()

  @property
  def is_primary(self) -> bool:
    return self.peers.is_primary

  def saves_in_storage(self) -> bool:
    return self.peers.saves_in_storage

  def stop_agreed(self, requested: bool, asked: int) -> bool:
    return self.peers.stopping or self.peers.left

  def stop_asked(self) -> bool:
    return self.peers.membership.stop_asked

  def on_role(self, callback: Callable[[bool], None]) -> None:
    self.peers.on_role.append(callback)

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
    self.peers.membership.send("finished", code=BAD_INPUT)
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


def numerics(device: Device) -> str:
  """What the bits of a program's results on the device depend on, besides the program and its compiler options."""
  kind = device.device_kind
  if device.platform == "cpu":  # programs use all instructions of this CPU
    kind = cpu_model() or kind
  flags = f"{os.environ.get('XLA_FLAGS', '')} {os.environ.get('LIBTPU_INIT_ARGS', '')}".split()
  of_bits = sorted(flag for flag in flags if "dump" not in flag and "host_platform_device_count" not in flag)
  versions = f"jax {jax.__version__}, jaxlib {jaxlib.__version__}, {device.client.platform_version}"
  return ", ".join([kind, *versions.split("\n"), *of_bits])


def _join_slice(cfg: ClusterSection, environment: Mapping[str, str], place: Place) -> None:
  """Chooses the devices of this process, and joins the other processes of the slice."""
  if place.gpu is not None:
    jax.config.update("jax_cuda_visible_devices", str(place.gpu))
  host_devices.force(max(cfg.devices_per_slice, 1), place.lanes, environment)
  if place.lanes > 1:
    joined_processes.initialize(
      f"process {place.lane} of {place.lanes} of member {place.member}",
      "the others",
      remedy="Look at the log of the process that does not start. The launcher starts the member again.",
      address=place.slice_coordinator,
      num_processes=place.lanes,
      process_id=place.lane,
      cluster_detection_method="deactivate",  # within Slurm it would leave each process only one GPU
    )
