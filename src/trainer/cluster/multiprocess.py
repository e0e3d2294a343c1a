"""Slices as separate JAX worlds: this process has the devices of its own slice, and exchanges sums with the others.

Nothing that another slice does enters XLA. A launcher (trainer.launch) starts the processes and says in the environment
where the supervisor is and who this process is.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping

import jax
from jax import Device

from trainer import world as world_lib
from trainer.cluster import host_devices
from trainer.cluster.api import Cluster, FaultTarget, View
from trainer.cluster.peers import Peers, RunEnded
from trainer.cluster.torchrun import ChildSupervisor
from trainer.config.schema import ClusterSection
from trainer.exchange import Exchange
from trainer.membership import wire
from trainer.membership.client import Membership, SupervisorLost
from trainer.membership.environment import SUPERVISOR, Place
from trainer.membership.wire import Channel, WireError
from trainer.observe import log
from trainer.world import World

# A peer may be saving a large checkpoint. If it has died, the supervisor says so, and the wait ends at once.
_CONNECT_SECONDS = 3600.0
_SLOW_SECONDS = 3600.0  # for a supervisor that listens and does not answer
_RETRY_SECONDS = 0.2
_REPORT_SECONDS = 5.0  # that the primary may need to report an error, and to end
_FAILED, BAD_INPUT = 1, 2  # exit codes
_PR_SET_PDEATHSIG = 1  # of prctl(2): the signal that this process gets when its parent ends


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
    peers = _join_run(place)
    peers.supervisor_lives = functools.partial(_answers, place)
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


def _continue_when_launcher_ends() -> None:
  """Lets this process find out that its launcher is gone, and end, also if it is stopped then. On Linux."""
  if sys.platform == "linux":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def _join_run(place: Place) -> Peers:
  """The members of the run, as this process sees them when the supervisor has let it join.

  Raises RunEnded with exit code 1 if there is none, which may be no fault of the configuration, and if it refuses.
  """
  _continue_when_launcher_ends()
  start = time.monotonic()
  while True:
    channel = _connect(place, start)
    host = place.host or channel.local_host
    exchange = Exchange(place.member, place.token, log.warn, host=host, connect_seconds=_CONNECT_SECONDS)
    membership = Membership(
      channel,
      member=place.member,
      lane=place.lane,
      lanes=place.lanes,
      address=exchange.address,
      interrupt=exchange.interrupt,
      warn=log.warn,
    )
    peers = Peers(membership, exchange, place.lane)
    try:
      welcome = membership.next()
      assert welcome is not None
      peers.handle(welcome)
      return peers
    except (RunEnded, SupervisorLost) as error:
      membership.close()
      exchange.close()
      if isinstance(error, RunEnded):
        raise
      # Perhaps it was the supervisor of the group before this one, which was about to end.
      _pause(place, start + (place.wait_seconds or _SLOW_SECONDS), "it has closed the connection")


def _connect(place: Place, start: float) -> Channel:
  """A connection to the supervisor. start: when this process began to join, in time.monotonic seconds. Raises RunEnded
  if there is none after place.wait_seconds. A launcher's supervisor listens already: it may be stopped or slow, unless
  the system refuses the connection."""
  while True:
    reasons, seconds = [], place.wait_seconds
    for address in place.supervisors:
      try:
        return wire.connect(address, place.token)
      except (OSError, WireError) as error:
        reasons.append(f"{address}: {error}")
        if not isinstance(error, ConnectionRefusedError | WireError):
          seconds = place.wait_seconds or _SLOW_SECONDS
    _pause(place, start + seconds, "; ".join(dict.fromkeys(reasons)))


def _answers(place: Place) -> bool:
  """Whether the supervisor accepts connections."""
  for address in place.supervisors:
    with contextlib.suppress(OSError, WireError):
      wire.connect(address, place.token).close()
      return True
  return False


def _pause(place: Place, deadline: float, reason: str) -> None:
  """Waits before the next attempt to join. Raises RunEnded at the deadline."""
  if time.monotonic() >= deadline:
    where = f"{SUPERVISOR}={','.join(place.supervisors)}"
    raise RunEnded(_FAILED, f"error: {where}: cannot join the run there: {reason}.\n{place.remedy}")
  time.sleep(_RETRY_SECONDS)


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
