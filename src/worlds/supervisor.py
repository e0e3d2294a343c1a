"""Supervises one run: decides about its members with a coordinator, and restarts those that are lost."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType

from worlds import addresses, lines
from worlds.exit_codes import FAILED, INTERRUPTED, PREEMPTED
from worlds.interruptions import Repeats, handled
from worlds.membership.coordinator import Coordinator
from worlds.membership.messages import FROM_AGENT, Message, check, message
from worlds.membership.run_rules import RunRules
from worlds.membership.server import Server
from worlds.membership.wire import Channel
from worlds.place import Place
from worlds.worker_processes import MemberProgram, Workers

_END_SECONDS = 30.0  # from the end of the run to the end of the last process
_INTERRUPT_SECONDS = 5.0
_LEAST_CONNECT_SECONDS = 30.0  # that every process has to import and connect
_MOST_SLICES = 1024  # of one agent
_AGENT_SECONDS = 2.0  # that an agent may need to end after its processes


def log(line: str) -> None:
  lines.tell(f"supervisor: {line}")


@dataclasses.dataclass(frozen=True)
class Where:
  """Where the supervisor of a run on several hosts listens."""

  listener: socket.socket
  host: str  # the address of this host for the other hosts
  token: bytes


class RemoteWorkers:
  """The members of one agent. Has the methods of `Workers` that a supervisor calls; all may be called from any thread.
  `send` raises nothing: an agent that cannot be reached is lost with its members, whose own connections say so."""

  def __init__(self, channel: Channel, members: frozenset[int], host: str) -> None:
    """host: where other members reach these members."""
    self._channel = channel
    self.members, self.host = members, host

  def send(self, kind: str, **fields: object) -> None:
    try:
      self._channel.send(message(kind, **fields))
    except BlockingIOError:  # it does not read
      self._channel.close()
    except OSError:
      pass

  def serve(self, ended: Callable[[int, int], None]) -> None:
    """Returns when the connection has ended. ended(member, code): a member has ended. Raises ValueError for a message
    that no agent would send, and WireError."""
    while (received := self._channel.receive()) is not None:
      check(received, FROM_AGENT)
      if received["kind"] != "ended" or received["member"] not in self.members:
        raise ValueError(f"sent {received}, and has the members {sorted(self.members)}")
      ended(received["member"], received["code"])

  def restart(self, member: int, seconds: float) -> None:
    """Starts the member again after so many seconds."""
    self.send("restart", member=member, seconds=seconds)

  def kill(self, member: int) -> None:
    """Ends the member's processes at once."""
    self.send("kill", member=member)

  def fault(self, action: str, member: int, seconds: float | None) -> None:
    self.send("act", action=action, member=member, seconds=seconds)

  def close(self, number: int, seconds: float, code: int) -> None:
    """Ends the agent and its processes. Does not wait for them."""
    self.send("close", number=number, seconds=seconds, code=code)


class Supervisor:
  """One run: its supervisor, the workers of this host, and those of the agents that join."""

  def __init__(
    self,
    program: MemberProgram,
    argv: Sequence[str],
    rules: RunRules,
    *,
    local: int,
    lanes: int,
    grace: float,
    where: Where | None = None,
    expected: int | None = None,
  ) -> None:
    """argv: of the program, on all hosts. local: slices of this host, spares included. lanes: processes per slice.
    grace: seconds that a member may need to save its state and end. where: on which address agents and members of other
    hosts are expected; None: this host has all slices. expected: slices that a start waits for; None: all."""
    self._lanes = lanes
    self._work = {"argv": list(argv), "lanes": lanes, "grace": grace, "run_command": program.run_command}
    self._grace = grace
    # A process that hangs before it connects is replaced while the run still waits for its member.
    self._connect_seconds = max(rules.timeout / 2, _LEAST_CONNECT_SECONDS)
    self._interrupted, self._failed = threading.Event(), threading.Event()
    self._repeats, self._ending = Repeats(), False
    self._at_once = 0  # the signal that ends the run without waiting for anything
    self._coordinator = Coordinator(rules, run_id=secrets.token_hex(6), expected=expected)
    token = where.token if where else secrets.token_bytes(32)
    self._server = Server(
      self._coordinator,
      token,
      listener=where.listener if where else None,
      kill=self._kill,
      fault=self._fault,
      agent=self._serve_agent if where else None,
      log=self._note,
    )
    self._address = addresses.join(where.host, where.listener.getsockname()[1]) if where else self._server.address
    place = Place((self._address,), token, 0, lanes=lanes, host=where.host if where else "")
    self._workers = Workers(program, argv, place, range(local), ended=self._ended, log=log)
    self._remote: list[RemoteWorkers] = []
    self._lock = threading.Lock()  # of self._remote
    self._starts: dict[int, float] = {}  # members that stay away: until when, by the clock
    self._missing: dict[int, float] = {}  # members without all connections: when that was first seen, by the clock

  def run(self) -> int:
    """Starts the members and supervises them to the end of the run. Returns the exit code of the run."""
    with handled(self._signalled, self._failed.set), contextlib.closing(self):
      log(f"Process {os.getpid()} supervises the run, at {self._address}. SIGTERM to it saves and ends the run.")
      self._workers.start()
      while not (self._server.over.wait(0.2) or self._interrupted.is_set() or self._failed.is_set() or self._at_once):
        self._end_missing()
      if self._at_once:
        log(f"Second {signal.Signals(self._at_once).name}: all processes end at once, without a save.")
        self._end(128 + self._at_once, signal.SIGKILL, 0.0)
        return 128 + self._at_once  # as shells report it
      if self._failed.is_set():
        self._server.close()  # as if this process had died: the members save the state and end
        self._end(FAILED, 0, self._grace + _END_SECONDS)
        return FAILED
      if self._interrupted.is_set():
        log("Interrupted: all processes end without a save. SIGTERM instead of Ctrl-C saves first.")
        self._end(INTERRUPTED, signal.SIGINT, _INTERRUPT_SECONDS)
        return INTERRUPTED
      run = self._coordinator
      assert run.code is not None
      # Do not wait for members that import or compile. The first ones have a log: they may write how they end.
      first = run.code == PREEMPTED and not run.committed
      for member in (self._workers.members - self._server.connected) | (set() if first else run.starting):
        self._kill(member, "")
      self._end(run.code, signal.SIGTERM if first else 0, _END_SECONDS)  # the members end by themselves
      return run.code

  def close(self) -> None:
    """Kills what is left of the members on this host, and ends all connections."""
    self._workers.close(signal.SIGKILL, 0.0)
    self._server.close()

  def _end(self, code: int, number: int, seconds: float) -> None:
    """Sends the signal to all processes of the run, and ends those that are left after `seconds`, or at a second signal
    to this process."""
    self._ending = True
    deadline = time.monotonic() + seconds + _AGENT_SECONDS
    for host in self._agents():
      host.close(number, seconds, code)
    self._workers.close(number, seconds)
    while self._agents() and time.monotonic() < deadline and not self._at_once:
      time.sleep(0.05)

  # ---- agents

  def _agents(self) -> list[RemoteWorkers]:
    with self._lock:
      return list(self._remote)

  def _serve_agent(self, channel: Channel, first: Message) -> None:
    """The connection of an agent, from its first message to its end. Raises ValueError and WireError."""
    if first["kind"] != "agent" or not 1 <= first["slices"] <= _MOST_SLICES:
      raise ValueError(f"sent {first}")
    connected = self._server.connected  # before the lock: the server calls this object while it holds another lock
    with self._lock:
      taken = self._workers.members.union(connected, *(host.members for host in self._remote))
      free = (member for member in itertools.count() if member not in taken)
      host = RemoteWorkers(channel, frozenset(itertools.islice(free, first["slices"])), first["host"])
      self._remote.append(host)
    members = ", ".join(map(str, sorted(host.members)))
    try:
      if self._coordinator.code is not None:
        host.close(0, 0.0, self._coordinator.code)
        return
      log(f"The agent at {host.host} starts the members {members}.")
      host.send("work", members=sorted(host.members), **self._work)
      host.serve(self._ended)
      if self._coordinator.code is None:
        log(f"The agent at {host.host} is gone. Its members {members} leave, and start again when it returns.")
    finally:
      with self._lock:
        self._remote.remove(host)
      self._coordinator.failures.allow_again(host.members)  # the next agent may be on another host

  def _hosts(self) -> list[Workers | RemoteWorkers]:
    """Those who start and kill members."""
    return [self._workers, *self._agents()]

  def _host(self, member: int) -> Workers | RemoteWorkers | None:
    """Who starts and kills the member; None: its agent is gone."""
    return next((host for host in self._hosts() if member in host.members), None)

  # ---- members

  def _end_missing(self) -> None:
    """Ends every member that has a process without a connection for too long. Such a process gives no signs of life."""
    now, connected = self._coordinator.clock(), self._server.processes
    hosts = {member: host for host in self._hosts() for member in host.members}
    missing = {m for m in hosts if any((m, lane) not in connected for lane in range(self._lanes))}
    self._missing = {m: max(self._missing.get(m, now), self._starts.get(m, 0.0)) for m in missing}
    for member, since in list(self._missing.items()):
      if now - since > self._connect_seconds:
        hosts[member].kill(member)
        log(f"Member {member} has not connected in {self._connect_seconds:g} s: its processes are ended.")
        del self._missing[member]  # the time of its next start begins

  def _ended(self, member: int, code: int) -> None:
    """A member has ended: it is lost to the run, and starts again unless that makes no sense."""
    reason = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    if self._interrupted.is_set():
      self._server.lost(member, reason)
      return
    host = self._host(member)
    name = host.host if isinstance(host, RemoteWorkers) else socket.gethostname()
    seconds = self._server.ended(member, code, name, reason)
    if host is not None and seconds is not None and self._coordinator.phase != "over":
      self._starts[member] = self._coordinator.clock() + seconds
      host.restart(member, seconds)

  def _note(self, line: str) -> None:
    """A decision of the coordinator. After Ctrl-C or a second signal it decides about members that end as intended."""
    if not self._interrupted.is_set() and not self._at_once:
      log(line)

  def _kill(self, member: int, reason: str) -> None:
    if host := self._host(member):
      host.kill(member)

  def _fault(self, action: str, member: int, seconds: float | None) -> None:
    if host := self._host(member):
      host.fault(action, member, seconds)

  def _signalled(self, number: int, frame: FrameType | None) -> None:
    # Not in the handler: it may have interrupted a thread that holds a lock of the server.
    if self._repeats(number) or (number == signal.SIGINT and self._ending and not self._interrupted.is_set()):
      self._at_once = number
      if self._ending:  # with the exit code that is known
        threading.Thread(target=self._workers.close, args=(signal.SIGKILL, 0.0), name="kill", daemon=True).start()
    elif number == signal.SIGINT:
      self._interrupted.set()
    else:
      threading.Thread(target=self._server.stop, name="stop", daemon=True).start()
