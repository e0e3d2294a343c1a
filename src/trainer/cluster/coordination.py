"""This process among the worlds of a run: who writes the files of the run, and how the worlds agree on its end."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from trainer.cluster.torchrun import ChildSupervisor
from trainer.world import World
from worlds.exit_codes import BAD_INPUT

if TYPE_CHECKING:
  from worlds.peers import Peers  # imports jax

_REPORT_SECONDS = 5.0  # that the primary may need to report an error, and to end


class Coordination:
  """A run of one world: there is nobody to agree with."""

  has_peers = False  # whether each slice of the run is a world of its own
  # The id of this launch, and of the run if it is new, where several worlds start it. "": the primary chooses the id.
  fresh_run_id = ""
  # Whether other worlds have opened the run's folder before this process: it must not create the folder.
  joins = False
  # Called after every step: whether the worlds of the run have agreed that this process must stop now. None: one world
  # decides by itself.
  stop_agreed: Callable[[], bool] | None = None

  def __init__(self, world: World) -> None:
    self._world = world

  @property
  def is_primary(self) -> bool:
    """Whether this process writes the files that exist once per run. May change during the run."""
    return self._world.is_primary

  def saves_in_storage(self) -> bool:
    """Whether this world writes the persistent checkpoints; of several worlds one does. May change during the run."""
    return True

  def stop_asked(self) -> bool:
    """Whether the process that supervises the run was asked to end it."""
    return False

  def on_role(self, callback: Callable[[bool], None]) -> None:
    """Has `callback` called with `is_primary` whenever that changes during the run."""

  def watch(self, *, busy: Callable[[], str], noticed: Callable[[], bool], unsupervised: Callable[[], None]) -> None:
    """Keeps the other worlds informed, so that they do not take a long save for a hang. busy(): what this process does
    between steps, "" if nothing. noticed(): whether it has received SIGTERM. unsupervised(): called from a thread when
    the supervisor, which would end this process if it hung, is lost."""

  def finished(self, code: int) -> None:
    """This process has done everything, or has failed as the others must, and will exit with `code`."""

  def is_reported(self) -> bool:
    """Whether another process has already reported an error of the user, and has ended the run with exit code 2. Call
    this before reporting such an error, because all processes find the same one. May wait for some seconds."""
    return False

  def close(self) -> None:
    """Ends the connections with the other worlds."""


class WithPeers(Coordination):
  """A run whose slices are worlds of their own."""

  has_peers = True

  def __init__(self, world: World, peers: Peers, supervisor: ChildSupervisor | None = None) -> None:
    """supervisor: of the run, if this process has started it."""
    super().__init__(world)
    self.peers, self._supervisor = peers, supervisor
    self.fresh_run_id, self.joins = peers.run_id, peers.begun
    self.stop_agreed = lambda: peers.stopping or peers.left
    self._launcher = os.getppid()

  @property
  def is_primary(self) -> bool:
    return self.peers.is_primary

  def saves_in_storage(self) -> bool:
    return self.peers.saves_in_storage

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

  def close(self) -> None:
    self.peers.membership.close()
    self.peers.exchange.close()
    if self._supervisor is not None:
      self._supervisor.close(over=self.peers.ended is not None)
