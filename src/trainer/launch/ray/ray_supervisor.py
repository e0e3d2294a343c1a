"""The supervisor of a run under Ray: Ray starts and restarts the workers, and this says where they belong."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence

from trainer.launch.ray import ray_slices
from trainer.launch.ray.ray_slices import Environment, RaySlot, RayWorker
from trainer.process import file_limit
from worlds import addresses
from worlds.exit_codes import FAILED
from worlds.membership.coordinator import Coordinator
from worlds.membership.failures import Failures
from worlds.membership.run_rules import RunRules
from worlds.membership.server import BACKLOG, Server
from worlds.place import Place
from worlds.supervisor import log

_POLL_SECONDS = 0.1


class RunSupervisor:
  """One run, over all groups of workers that Ray starts for it. All methods may be called from any thread.

  Ray Train either restarts the whole group after a loss (`begin` again), or only the lost worker (`replace`).
  """

  def __init__(
    self, rules: RunRules, *, host: str, lanes: int, tpu: bool, attempts: int, kill: Callable[[RayWorker], None]
  ) -> None:
    """host: where the workers reach this process. lanes: workers of a slice. attempts: groups without progress before
    the run gives up. kill: ends a worker's process, and returns at once."""
    file_limit.raise_limit()  # each worker has a connection
    self._rules, self._host, self._lanes, self._tpu, self._kill = rules, host, lanes, tpu, kill
    self._attempts, self._tries = attempts, 0
    self._failures = Failures(rules.attempts)  # of all groups
    self._run_id = secrets.token_hex(6)
    self._lock = threading.RLock()
    self._server: Server | None = None
    self._token = b""
    self._slots: dict[int, RaySlot] = {}
    self._workers: dict[int, RayWorker] = {}
    self._stopping = False  # the run must end, and not begin again
    self._leaving = False  # this group ends, and Ray starts another one
    self._code: int | None = None  # of the run, once it is over
    self._starts: dict[int, tuple[str, float]] = {}  # by member: (host, from when it may start again there)
    self._counted: set[int] = set()  # members whose end is counted, and that have not been replaced yet

  # ---- what Ray has started ----

  def begin(self, workers: Sequence[RayWorker]) -> dict[int, Environment]:
    """A group of workers has started, and the group before it is gone. Returns {rank: its environment}."""
    with self._lock:
      progress = self._server is not None and bool(self._server.coordinator.committed)
      self._tries = 1 if progress else self._tries + 1
      self._counted.clear()
      self.close()
      self._slots = ray_slices.slots(workers, self._lanes)
      self._workers = {worker.rank: worker for worker in workers}
      self._token, self._leaving = secrets.token_bytes(32), False
      expected = len(workers) // self._lanes
      coordinator = Coordinator(self._rules, run_id=self._run_id, expected=expected, failures=self._failures)
      listener = addresses.listen(self._host, 0, BACKLOG)
      self._server = Server(
        coordinator, self._token, listener=listener, kill=self._kill_member, fault=self._fault, log=log
      )
      if self._code is not None:
        self._server.end(self._code, "")
      elif self._stopping:
        self._server.stop()
      elif self._tries > self._attempts:
        self._server.end(FAILED, f"{self._attempts} groups of workers have ended without a new step.")
      log(f"Ray has started {len(workers)} workers: {len(workers) // self._lanes} slices.")
      return {rank: self._environment(rank) for rank in self._workers}

  def replace(self, worker: RayWorker) -> Environment:
    """Ray has started this worker in the place of one of the same rank, which is gone. Returns its environment."""
    with self._lock:
      assert self._server is not None and self._lanes == 1, "only a group of slices of one worker has replacements"
      member = self._slots[worker.rank].member
      self._lost(self._server, worker.rank, None, "was replaced by Ray")  # a crash, or a lost host
      self._counted.discard(member)
      self._workers[worker.rank] = worker
      log(f"Ray has started the worker of member {member} again.")
      return self._environment(worker.rank)

  def pause(self, rank: int) -> float:
    """Seconds that this worker must wait before it starts the program, because it has failed again and again."""
    with self._lock:
      member = self._slots[rank].member
      host, at = self._starts.get(member, ("", 0.0))
      return max(0.0, at - time.monotonic()) if host == self._workers[rank].host else 0.0

  def _environment(self, rank: int) -> Environment:
    assert self._server is not None
    slot = self._slots[rank]
    ranks = {other.lane: r for r, other in self._slots.items() if other.member == slot.member}
    first = self._workers[ranks[0]]
    place = Place(
      (self._server.address,),
      self._token,
      slot.member,
      slot.lane,
      self._lanes,
      host=self._workers[rank].host,
      slice_coordinator=addresses.join(first.host, first.port) if self._lanes > 1 else "",
    )
    hosts = [self._workers[ranks[lane]].host for lane in range(self._lanes)]
    return ray_slices.environment(place, hosts, tpu=self._tpu)

  # ---- how workers and groups end ----

  def ended(self, rank: int, code: int) -> int | None:
    """A worker's program has ended with `code`. Returns the exit code of the run if it is over for this worker.

    None: Ray must start the worker again.
    """
    with self._lock:
      server, member = self._server, self._slots[rank].member
      assert server is not None
      run = server.coordinator
      self._lost(server, rank, code, f"ended with exit code {code}")
      if run.code is None and not run.stopping:
        for other, slot in self._slots.items():
          if slot.member == member and other != rank:
            self._kill(self._workers[other])  # a slice is lost as a whole
        return None
      return code if run.code is None else run.code

  def _lost(self, server: Server, rank: int, code: int | None, reason: str) -> None:
    """The worker's member has ended with `code`; None: unknown. A slice of several workers ends once."""
    member, host = self._slots[rank].member, self._workers[rank].host
    if member in self._counted:
      server.lost(member, reason)
    elif (seconds := server.ended(member, code, host, reason)) is not None:
      self._counted.add(member)
      self._starts[member] = host, time.monotonic() + seconds

  def leave(self, seconds: float) -> None:
    """Ray is about to end this group: its members save the state and end. Returns when they have, or after `seconds`.

    Does nothing if the run is over.
    """
    with self._lock:
      server = self._server
      if server is None or server.coordinator.code is not None:
        return
      self._leaving = True
      server.stop()
    log("Ray ends this group of workers. They save the state and end.")
    deadline = time.monotonic() + seconds
    while server.connected and time.monotonic() < deadline:
      time.sleep(_POLL_SECONDS)
    if server.connected:
      log(f"The members {sorted(server.connected)} have not saved in {seconds:g} s.")

  def stop(self) -> None:
    """The run must end after the step under way, with a checkpoint and exit code 42."""
    with self._lock:
      self._stopping = True
      if self._server is not None:
        self._server.stop()

  def fail(self) -> None:
    """A thread of this process has failed: the run ends with exit code 1."""
    with self._lock:
      if self._server is not None:
        self._server.end(FAILED, "The supervisor has failed.")

  def exit_code(self) -> int | None:
    """The exit code of the run; None: it is not over."""
    with self._lock:
      self._take_code()
      return self._code

  def _take_code(self) -> None:
    if self._code is None and self._server is not None and (not self._leaving or self._stopping):
      self._code = self._server.coordinator.code

  def close(self) -> None:
    self._take_code()
    if self._server is not None:
      self._server.close()

  def _kill_member(self, member: int, reason: str) -> None:
    for rank, slot in self._slots.items():
      if slot.member == member:
        self._kill(self._workers[rank])

  def _fault(self, action: str, member: int, seconds: float | None) -> None:
    """Causes a rehearsed loss. Ray starts the member again. The command has refused all other faults."""
    if action == "lose":
      self._kill_member(member, "")
