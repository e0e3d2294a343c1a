"""Slices as separate JAX worlds: this process has the devices of its own slice, and exchanges sums with the others.

Nothing that another slice does enters XLA. A launcher (trainer.launch) starts the processes and says in the environment
where the supervisor is and who this process is.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

import jax
import jaxlib
from jax import Device

from trainer import world as world_lib
from trainer.cluster import host_devices, joined_processes
from trainer.cluster.api import Cluster, FaultTarget, View
from trainer.cluster.coordination import WithPeers
from trainer.cluster.torchrun import ChildSupervisor
from trainer.config.schema import ClusterSection
from trainer.world import World
from worlds.join import join
from worlds.peers import Peers
from worlds.place import Place


class MultiprocessCluster(Cluster):
  """This process's slice, and its place among the members of the run."""

  kind = "multiprocess"

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
    super().__init__({peers.member: devices}, world, WithPeers(world, peers, supervisor))
    self._num_slices, self._place, self._send = num_slices, place, peers.membership.send

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
    self._send("fault", action=action, target=target, seconds=seconds)

  def view(self, alive: object = None) -> View:
    """The view of every attempt: this process's own slice. Its program computes one share."""
    ((member, devices),) = self.slices.items()
    return View((member,), (devices,), 1, (0,))

  def alive(self) -> frozenset[int]:
    return frozenset(self.slices)

  def returned(self, view: View) -> frozenset[int]:
    return frozenset()

  def stop(self) -> None:
    self.coordination.close()
    if self.world.size > 1:
      with contextlib.suppress(RuntimeError):  # another process of the slice has died
        jax.distributed.shutdown()


def numerics(device: Device) -> str:
  """What the bits of a program's results on the device depend on, besides the program and its compiler options."""
  kind, info = device.device_kind, Path("/proc/cpuinfo")
  if device.platform == "cpu" and info.exists():  # programs use all instructions of this CPU
    models = [line for line in info.read_text().splitlines() if line.startswith("model name")]
    kind = models[0].partition(":")[2].strip() if models else kind
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
