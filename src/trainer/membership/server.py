"""The supervisor's side of the connections: authenticates members, feeds the coordinator, carries out its effects."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from trainer.membership import wire
from trainer.membership.coordinator import Coordinator, Effects, Kill, Note, Send
from trainer.membership.messages import Message
from trainer.membership.wire import Channel, WireError

_TICK_SECONDS = 0.1
_MAX_STRANGERS = 64  # connections that have not proven the token yet
_BACKLOG = 64

FaultHandler = Callable[[str, int, float | None], None]


class Server:
  """Listens for members. One lock guards the coordinator; effects are carried out in the order of the decisions."""

  def __init__(
    self,
    coordinator: Coordinator,
    token: bytes,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    kill: Callable[[int, str], None],
    fault: FaultHandler = lambda action, member, seconds: None,
    log: Callable[[str], None] = lambda line: None,
  ) -> None:
    """kill(member, reason): ends the processes of a hung member. fault(action, member, seconds): causes a rehearsed
    fault. Both return at once. log takes a line for people. All are called from threads."""
    self.coordinator = coordinator
    self._token, self._kill, self._fault, self._log = token, kill, fault, log
    self._lock = threading.RLock()
    self._channels: dict[tuple[int, int], Channel] = {}  # by (member, lane)
    self._strangers = threading.BoundedSemaphore(_MAX_STRANGERS)
    self._closed = threading.Event()
    self.over = threading.Event()
    self._listener = socket.create_server((host, port), backlog=_BACKLOG)
    self.address = f"{host}:{self._listener.getsockname()[1]}"
    threading.Thread(target=self._listen, name="supervisor listens", daemon=True).start()
    threading.Thread(target=self._tick, name="supervisor ticks", daemon=True).start()

  @property
  def connected(self) -> frozenset[int]:
    """The members that have a connection."""
    with self._lock:
      return frozenset(member for member, _ in self._channels)

  def lost(self, member: int, reason: str, seconds: float = 0.0) -> None:
    """The processes of `member` have ended, or hang since `seconds`."""
    with self._lock:
      for lane in [key for key in self._channels if key[0] == member]:
        self._channels.pop(lane).close()
      self._carry_out(self.coordinator.lost(member, reason, seconds))

  def stop(self) -> None:
    """The run must end in good order."""
    with self._lock:
      self._carry_out(self.coordinator.stop())

  def end(self, code: int, reason: str) -> None:
    """The run cannot go on."""
    with self._lock:
      self._carry_out(self.coordinator.end(code, reason))

  def close(self) -> None:
    """Ends all connections and threads."""
    self._closed.set()
    self._listener.close()
    with self._lock:
      for channel in self._channels.values():
        channel.close()
      self._channels.clear()

  def _listen(self) -> None:
    while not self._closed.is_set():
      try:
        sock, _ = self._listener.accept()
      except OSError:
        return
      if not self._strangers.acquire(blocking=False):
        sock.close()
        continue
      threading.Thread(target=self._serve, args=(sock,), name="supervisor serves", daemon=True).start()

  def _serve(self, sock: socket.socket) -> None:
    """Thread: one connection, from its handshake to its end."""
    try:
      channel = wire.accept(sock, self._token)
      first = channel.receive()
      who = _identity(first)
    except (WireError, ValueError) as error:
      self._log(f"A connection to the supervisor was refused: it {error}.")
      sock.close()
      return
    finally:
      self._strangers.release()
    member, lane, lanes, address = who
    with self._lock:
      if self._closed.is_set() or (member, lane) in self._channels:
        self._log(f"A second process says that it is member {member}; it was refused.")
        channel.close()
        return
      self._channels[member, lane] = channel
      self._carry_out(self.coordinator.hello(member, lane, lanes, address))
    reason = "its connection to the supervisor has ended"
    try:
      while (received := channel.receive()) is not None:
        with self._lock:
          if self._channels.get((member, lane)) is not channel:
            return
          self._carry_out(self._handle(member, lane, received))
    except (WireError, ValueError, KeyError, TypeError) as error:
      reason = f"its connection broke the protocol: it {error}"
    with self._lock:
      if self._channels.get((member, lane)) is channel:
        self.lost(member, reason)

  def _handle(self, member: int, lane: int, received: Message) -> Effects:
    """What one message of a member leads to."""
    run, kind = self.coordinator, received["kind"]
    if kind == "beat":
      run.pulse.beat(member, str(received["busy"]))
      return []
    if kind == "ready":
      return run.ready(member, lane, int(received["newest"]))
    if kind == "restored":
      return run.restored(member, lane, int(received["step"]))
    if kind == "joined":
      return run.joined(member, lane, int(received["epoch"]))
    if kind == "computed":
      return run.computed(member, int(received["epoch"]), str(received["round"]), float(received["seconds"]))
    if kind == "done":
      return run.done(member, lane, int(received["epoch"]), str(received["round"]))
    if kind == "broken":
      return run.broken(member, int(received["epoch"]), tuple(int(m) for m in received["members"]))
    if kind == "leave":
      return run.leave(member)
    if kind == "finished":
      return run.finished(member, int(received["code"]))
    if kind == "fault":
      seconds = received["seconds"]
      self._fault(str(received["action"]), int(received["target"]), None if seconds is None else float(seconds))
      return []
    raise ValueError(f"sent a message of the unknown kind {kind!r}")

  def _carry_out(self, effects: Effects) -> None:
    """To be called with the lock: so every member gets the messages in the order of the decisions."""
    for effect in effects:
      if isinstance(effect, Note):
        self._log(effect.text)
      elif isinstance(effect, Kill):
        self._log(f"Member {effect.member} hangs: {effect.reason}.")
        self._kill(effect.member, effect.reason)
        self.lost(effect.member, effect.reason, effect.seconds)
      elif isinstance(effect, Send):
        for key in [key for key in self._channels if key[0] == effect.member]:
          with contextlib.suppress(OSError):  # the thread that reads this connection reports the loss
            self._channels[key].send(effect.message)
    if self.coordinator.phase == "over":
      self.over.set()

  def _tick(self) -> None:
    while not self._closed.wait(_TICK_SECONDS):
      with self._lock:
        self._carry_out(self.coordinator.tick())


def _identity(first: Mapping[str, Any] | None) -> tuple[int, int, int, str]:
  """(member, lane, lanes, address) of a first message. Raises ValueError if it is something else."""
  if first is None or first.get("kind") != "hello":
    raise ValueError("did not say hello")
  member, lane, lanes, address = (first.get(name) for name in ("member", "lane", "lanes", "address"))
  if not (isinstance(member, int) and isinstance(lane, int) and isinstance(lanes, int) and isinstance(address, str)):
    raise ValueError("sent a hello without member, lane, lanes and address")
  if member < 0 or not 0 <= lane < lanes:
    raise ValueError(f"sent a hello of member {member}, lane {lane} of {lanes}")
  return member, lane, lanes, address


def now_on_all_hosts() -> float:
  """Seconds of a clock that means the same on all hosts, as far as their clocks agree."""
  return time.time()
