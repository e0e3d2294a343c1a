"""The supervisor's side of the connections: authenticates members, feeds the coordinator, carries out its effects."""

from __future__ import annotations

import functools
import socket
import threading
import time
from collections.abc import Callable, Mapping

from worlds import addresses
from worlds.exit_codes import PREEMPTED
from worlds.lines import Sparse
from worlds.membership import wire
from worlds.membership.coordinator import Coordinator
from worlds.membership.effects import Effects, Kill, Note, Send, to_all
from worlds.membership.messages import FROM_AGENT, FROM_MEMBER, Message, check, failing_line, message
from worlds.membership.wire import HANDSHAKE_SECONDS, Channel, WireError

_TICK_SECONDS = 0.1
_MAX_STRANGERS = 64  # connections that have not said hello yet; the oldest one makes room for another
BACKLOG = 64
_CLOSE_SECONDS = 5.0

FaultHandler = Callable[[str, int, float | None], None]
AgentHandler = Callable[[Channel, Message], None]
# What a message `m` of the process `lane` of a member leads to.
_REPORTS: Mapping[str, Callable[[Coordinator, int, int, Message], Effects]] = {
  "ready": lambda run, member, lane, m: run.ready(member, lane, m["newest"], m["holds"]),
  "restored": lambda run, member, lane, m: run.restored(member, lane, m["epoch"], m["step"]),
  "joined": lambda run, member, lane, m: run.joined(member, lane, m["epoch"]),
  "computed": lambda run, member, lane, m: run.computed(member, m["epoch"], m["seconds"]),
  "device": lambda run, member, lane, m: run.device(member, m["where"], m["numerics"]),
  "witness": lambda run, member, lane, m: run.witnessed(member, m["epoch"], m["sums"]),
  "done": lambda run, member, lane, m: run.done(member, lane, m["epoch"], m["round"], m["checksum"]),
  "broken": lambda run, member, lane, m: run.broken(member, m["epoch"], m["members"]),
  "interruptible": lambda run, member, lane, m: run.interruptible(member, lane),
  "leave": lambda run, member, lane, m: run.leave(member),
  "finished": lambda run, member, lane, m: run.finished(member, m["code"]),
}


class Server:
  """Listens for members. One lock guards the coordinator; effects are carried out in the order of the decisions."""

  def __init__(
    self,
    coordinator: Coordinator,
    token: bytes,
    *,
    listener: socket.socket | None = None,
    kill: Callable[[int, str], None],
    fault: FaultHandler = lambda action, member, seconds: None,
    agent: AgentHandler | None = None,
    log: Callable[[str], None] = lambda line: None,
  ) -> None:
    """listener: bound; by default on a free port of the loopback address. kill(member, reason) ends a hung member's
    processes, fault(action, member, seconds) causes a rehearsed fault; both return at once. agent(channel, first
    message) serves an agent's connection to its end; None: agents are refused. log takes a line. Threads call all of
    them."""
    self.coordinator = coordinator
    self._token, self._kill, self._fault, self._agent, self._log = token, kill, fault, agent, log
    self._lock = threading.RLock()
    self._channels: dict[int, dict[int, Channel]] = {}  # by member, then by lane
    self._agents: set[Channel] = set()
    self._strangers: dict[socket.socket, float] = {}  # when they connected, by the clock, the oldest first
    self._log_stranger = Sparse(log)
    self._threads: set[threading.Thread] = set()
    self._closed = threading.Event()
    self.over = threading.Event()
    self._listener = listener or addresses.listen("127.0.0.1", 0, BACKLOG)
    self.address = addresses.join(*self._listener.getsockname()[:2])
    self._start("supervisor listens", self._listen)
    self._start("supervisor ticks", self._tick)

  @property
  def connected(self) -> frozenset[int]:
    with self._lock:
      return frozenset(self._channels)

  @property
  def processes(self) -> frozenset[tuple[int, int]]:
    """(member, lane) of the processes that have a connection."""
    with self._lock:
      return frozenset((member, lane) for member, lanes in self._channels.items() for lane in lanes)

  def lost(self, member: int, reason: str, seconds: float = 0.0) -> None:
    """The processes of `member` have ended, or hang since `seconds`."""
    with self._lock:
      for channel in self._channels.pop(member, {}).values():
        channel.close()
      self._carry_out(self.coordinator.lost(member, reason, seconds))

  def ended(self, member: int, code: int | None, host: str, reason: str) -> float | None:
    """`member`, which ran on `host`, has ended with this code (None: unknown): it is lost. Ends the run if all members
    would fail again. Returns the seconds until the member's next start; None: the run was over before, or stops."""
    with self._lock:
      self.lost(member, reason)
      run = self.coordinator
      if run.code is not None or run.stopping:
        return None
      self._log(f"Member {member} {reason}.")
      times, seconds = run.failures.ended(member, code, host, waits=run.phase != "running")
      self._carry_out(run.judge())
      if times > 1 and run.code is None:
        told = message("failing", member=member, host=host, error=reason, times=times, pause_seconds=seconds)
        self._carry_out([Note(failing_line(told)), *to_all(self.connected, told)])
      return seconds

  def stop(self) -> None:
    """The run must end in good order."""
    with self._lock:
      asked = to_all(self.connected, message("stop"))  # for what follows the last step
      self._carry_out([*asked, *self.coordinator.stop()])

  def end(self, code: int, reason: str) -> None:
    """The run cannot go on."""
    with self._lock:
      self._carry_out(self.coordinator.end(code, reason))

  def close(self) -> None:
    """Ends all connections and threads."""
    self._closed.set()
    wire.shut_down(self._listener)  # closing alone would not wake the thread that accepts
    self._listener.close()
    with self._lock:
      for channel in (*(channel for lanes in self._channels.values() for channel in lanes.values()), *self._agents):
        channel.close()
      self._channels.clear()
      for sock in self._strangers:
        wire.shut_down(sock)
      threads = list(self._threads)
    deadline = time.monotonic() + _CLOSE_SECONDS
    for thread in threads:
      thread.join(max(0.0, deadline - time.monotonic()))

  def _start(self, name: str, work: Callable[[], None]) -> None:
    """Runs `work` in a thread that `close` waits for."""

    def run() -> None:
      try:
        work()
      finally:
        with self._lock:
          self._threads.discard(threading.current_thread())

    thread = threading.Thread(target=run, name=name, daemon=True)
    with self._lock:
      thread.start()
      self._threads.add(thread)

  def _listen(self) -> None:
    while not self._closed.is_set():
      try:
        sock, _ = self._listener.accept()
        self._admit(sock)
      except (OSError, RuntimeError) as error:
        if not self._closed.wait(_TICK_SECONDS):  # too many open files or threads, for example: it may pass
          self._log_stranger(f"A connection to the supervisor could not be accepted: {error}.")

  def _admit(self, sock: socket.socket) -> None:
    """Serves a new connection in a thread. Raises RuntimeError if none can be started."""
    with self._lock:
      if self._closed.is_set():
        sock.close()
        return
      if len(self._strangers) >= _MAX_STRANGERS:
        wire.shut_down(next(iter(self._strangers)))
        del self._strangers[next(iter(self._strangers))]
      try:
        self._start("supervisor serves", functools.partial(self._serve, sock))
      except RuntimeError:
        sock.close()
        raise
      self._strangers[sock] = self.coordinator.clock()  # before the thread gets the lock

  def _serve(self, sock: socket.socket) -> None:
    """Thread: one connection, from its handshake to its end."""
    try:
      channel = wire.accept(sock, self._token)
      first = channel.receive()
      if first is not None and first.get("kind") == "agent":
        self._serve_agent(sock, channel, first)
        return
      with self._lock:
        in_time = self._strangers.pop(sock, None) is not None and not self._closed.is_set()
        if first is None and in_time:  # it has only asked whether the supervisor lives
          channel.close()
          return
        if first is None or first.get("kind") != "hello":
          raise ValueError("did not say hello")
        if not in_time:
          raise WireError("came too late")
        check(first, FROM_MEMBER)
        member, lane, lanes, address = (first[name] for name in FROM_MEMBER["hello"])
        if member < 0 or not 0 <= lane < lanes:
          raise ValueError(f"sent a hello of member {member}, lane {lane} of {lanes}")
        if lane in self._channels.get(member, {}):
          reason = f"says that it is member {member}, lane {lane}, which has a connection already"
          channel.send(message("end", code=PREEMPTED, reason=f"The supervisor refuses this process: it {reason}."))
          raise WireError(reason)
        effects = self.coordinator.hello(member, lane, lanes, address)
        self._channels.setdefault(member, {})[lane] = channel
        self._carry_out(effects)
    except (WireError, ValueError) as error:
      if not self._closed.is_set():
        self._log_stranger(f"A connection to the supervisor was refused: it {error}.")
      with self._lock:
        self._strangers.pop(sock, None)
        sock.close()
      return
    reason = "its connection to the supervisor has ended"
    try:
      while (received := channel.receive()) is not None:
        with self._lock:
          if self._channels.get(member, {}).get(lane) is not channel:
            return
          self._carry_out(self._handle(member, lane, received))
    except (WireError, ValueError) as error:
      reason = f"it broke the protocol: it {error}"
      self._log(f"Member {member} is dropped, because {reason}.")
    with self._lock:
      if self._channels.get(member, {}).get(lane) is channel:
        self.lost(member, reason)

  def _serve_agent(self, sock: socket.socket, channel: Channel, first: Message) -> None:
    """One connection of an agent. Raises ValueError if agents are refused, or if it breaks the protocol."""
    check(first, FROM_AGENT)
    with self._lock:
      if self._agent is None or self._strangers.pop(sock, None) is None or self._closed.is_set():
        raise ValueError("is an agent, and this run has no slices for agents")
      self._agents.add(channel)
    try:
      self._agent(channel, first)
    finally:
      with self._lock:
        self._agents.discard(channel)
        channel.close()

  def _handle(self, member: int, lane: int, received: Message) -> Effects:
    """What one message of a member leads to. Raises ValueError if no member would send it."""
    check(received, FROM_MEMBER)
    kind = received["kind"]
    if kind == "hello":
      raise ValueError(f"sent a second {kind!r}")
    if kind == "beat":
      self.coordinator.pulse.beat(member, lane, received["busy"])
      return []
    if kind == "fault":
      self._fault(received["action"], received["target"], received["seconds"])
      return []
    return _REPORTS[kind](self.coordinator, member, lane, received)

  def _carry_out(self, effects: Effects) -> None:
    """To be called with the lock: so every member gets the messages in the order of the decisions."""
    bodies: dict[int, wire.Body] = {}  # a message to many members is one object
    killed: list[Kill] = []  # their loss is decided after the messages of these effects are sent
    for effect in effects:
      if isinstance(effect, Note):
        self._log(effect.text)
      elif isinstance(effect, Kill):
        self._kill(effect.member, effect.reason)
        self._log(f"Member {effect.member} is ended: {effect.reason}.")
        killed.append(effect)
      elif isinstance(effect, Send):
        body = bodies.get(id(effect.message)) or bodies.setdefault(id(effect.message), wire.encode(effect.message))
        for channel in list(self._channels.get(effect.member, {}).values()):
          try:
            channel.send(body)
          except BlockingIOError:
            channel.close()
            self._log(f"Member {effect.member} does not read its messages. Its connection is closed.")
          except OSError:
            pass  # the thread that reads this connection reports the loss
    for effect in killed:
      self.lost(effect.member, effect.reason, effect.seconds)
    if self.coordinator.phase == "over":
      self.over.set()

  def _tick(self) -> None:
    while not self._closed.wait(_TICK_SECONDS):
      with self._lock:
        self._carry_out([*self._dead_hosts(), *self.coordinator.tick()])
        late = self.coordinator.clock() - HANDSHAKE_SECONDS
        for sock in [sock for sock, since in self._strangers.items() if since < late]:
          del self._strangers[sock]
          wire.shut_down(sock)

  def _dead_hosts(self) -> Effects:
    """Ends the members of hosts that do not answer."""
    return [
      Kill(member, f"its host does not answer, for {seconds:.1f} s", seconds)
      for member, lane, seconds in self.coordinator.pulse.late()
      if (channel := self._channels.get(member, {}).get(lane)) and channel.is_dead()
    ]
