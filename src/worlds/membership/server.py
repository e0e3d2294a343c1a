"""The supervisor's side of the connections: authenticates members, feeds the coordinator, carries out its effects."""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
import time
from collections.abc import Callable

from worlds import addresses
from worlds.interruptions import PREEMPTED
from worlds.lines import Sparse
from worlds.membership import wire
from worlds.membership.coordinator import Coordinator
from worlds.membership.effects import Effects, Kill, Note, Send
from worlds.membership.messages import FROM_AGENT, FROM_MEMBER, Message, check, failing_line, message, step_of
from worlds.membership.wire import HANDSHAKE_SECONDS, Channel, WireError

_TICK_SECONDS = 0.1
_MAX_STRANGERS = 64  # connections that have not said hello yet; the oldest one makes room for another
BACKLOG = 64
_CLOSE_SECONDS = 5.0

FaultHandler = Callable[[str, int, float | None], None]
AgentHandler = Callable[[Channel, Message], None]


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
    """The members that have a connection."""
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
        self._carry_out([Note(failing_line(told)), *(Send(other, told) for other in self.connected)])
      return seconds

  def stop(self) -> None:
    """The run must end in good order."""
    with self._lock:
      asked = [Send(member, message("stop")) for member in self.connected]  # for what follows the last step
      self._carry_out([*asked, *self.coordinator.stop()])

  def end(self, code: int, reason: str) -> None:
    """The run cannot go on."""
    with self._lock:
      self._carry_out(self.coordinator.end(code, reason))

  def close(self) -> None:
    """Ends all connections and threads."""
    self._closed.set()
    _shut_down(self._listener)  # closing alone would not wake the thread that accepts
    self._listener.close()
    with self._lock:
      for channel in (*(channel for lanes in self._channels.values() for channel in lanes.values()), *self._agents):
        channel.close()
      self._channels.clear()
      for sock in self._strangers:
        _shut_down(sock)
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
        _shut_down(next(iter(self._strangers)))
        del self._strangers[next(iter(self._strangers))]
      self._strangers[sock] = self.coordinator.clock()
      try:
        self._start("supervisor serves", functools.partial(self._serve, sock))
      except RuntimeError:
        del self._strangers[sock]
        sock.close()
        raise

  def _serve(self, sock: socket.socket) -> None:
    """Thread: one connection, from its handshake to its end."""
    try:
      channel = wire.accept(sock, self._token)
      first = channel.receive()
      if first is not None and first.get("kind") == "agent":
        self._serve_agent(sock, channel, first)
        return
      if first is None and self._closed_in_time(sock):  # it has only asked whether the supervisor lives
        channel.close()
        return
      member, lane, lanes, address = _identity(first)
      with self._lock:
        if self._strangers.pop(sock, None) is None or self._closed.is_set():
          raise WireError("came too late")
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

  def _closed_in_time(self, sock: socket.socket) -> bool:
    """Whether a connection that has ended was not ended by this side. It is no stranger any more."""
    with self._lock:
      since = self._strangers.pop(sock, None)
      return since is not None and self.coordinator.clock() - since < HANDSHAKE_SECONDS

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
    run, kind = self.coordinator, received["kind"]
    if kind == "beat":
      run.pulse.beat(member, lane, received["busy"])
      return []
    if kind == "ready":
      return run.ready(member, lane, received["newest"], received["holds"])
    if kind == "restored":
      return run.restored(member, lane, received["epoch"], received["step"])
    if kind == "joined":
      return run.joined(member, lane, received["epoch"])
    if kind == "computed":
      return run.computed(member, received["epoch"], received["seconds"])
    if kind == "device":
      return run.device(member, received["where"], received["numerics"])
    if kind == "witness":
      return run.witnessed(member, received["epoch"], received["sums"])
    if kind == "done":
      step_of(received["round"])  # ValueError before anything changes
      return run.done(member, lane, received["epoch"], received["round"], received["checksum"])
    if kind == "broken":
      return run.broken(member, received["epoch"])
    if kind == "unreachable":
      if not all(isinstance(other, int) for other in received["members"]):
        raise ValueError(f"sent 'unreachable' with members={received['members']}")
      return run.broken(member, received["epoch"], received["members"])
    if kind == "evaluates":
      return run.evaluates(member, received["round"])
    if kind == "leave":
      return run.leave(member)
    if kind == "finished":
      return run.finished(member, received["code"])
    if kind == "fault":
      self._fault(received["action"], received["target"], received["seconds"])
      return []
    raise ValueError(f"sent a second {kind!r}")

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
          _shut_down(sock)

  def _dead_hosts(self) -> Effects:
    """Ends the members of hosts that do not answer."""
    return [
      Kill(member, f"its host does not answer, for {seconds:.1f} s", seconds)
      for member, lane, seconds in self.coordinator.pulse.late()
      if (channel := self._channels.get(member, {}).get(lane)) and channel.is_dead()
    ]


def _identity(first: Message | None) -> tuple[int, int, int, str]:
  """(member, lane, lanes, address) of a first message. Raises ValueError if it is something else."""
  if first is None or first.get("kind") != "hello":
    raise ValueError("did not say hello")
  check(first, FROM_MEMBER)
  member, lane, lanes, address = (first[name] for name in ("member", "lane", "lanes", "address"))
  if member < 0 or not 0 <= lane < lanes:
    raise ValueError(f"sent a hello of member {member}, lane {lane} of {lanes}")
  return member, lane, lanes, address


def _shut_down(sock: socket.socket) -> None:
  """Ends the connection. A thread that waits for it wakes, and closes the socket."""
  with contextlib.suppress(OSError):  # the other side was faster
    sock.shutdown(socket.SHUT_RDWR)
