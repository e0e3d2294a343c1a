"""Accepts connections of peers on a thread of its own, and closes all others after a short time.

Frames after the handshake have checksums but are neither signed nor encrypted, so the network between slices must be
private.
"""

from __future__ import annotations

import dataclasses
import errno
import hmac
import itertools
import os
import select
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Generator, Mapping
from typing import NamedTuple

from worlds import addresses, handshake
from worlds.exchange.exchange_errors import PeerLost, Unreachable
from worlds.exchange.link import Stop, Stopped
from worlds.lines import Sparse

HANDSHAKE_SECONDS = 30.0  # a caller that gets little of its CPU is no stranger; MOST_PENDING limits those
MOST_PENDING = 64  # strangers, connections without a handshake; one more closes the oldest, so that they block nobody
_BACKLOG = 4096  # the system limits it
REACH_SECONDS = 1.4  # the system of a host that lives answers at once, also for a process that is busy or stopped
_ASK_SECONDS = 0.35  # from one attempt to reach it to the next: packets may be lost
_LOOK_SECONDS = 0.1  # at the time limits of attempts
_AT_ONCE = 8  # connections that a member makes at the same time: more, and a busy machine answers none of them in time
_PAUSE_SECONDS = 0.1  # after a failed accept, which usually means that descriptors are used up


_CALL = struct.Struct("<QIIH")
ANSWER_BYTES = handshake.ANSWER_BYTES + _CALL.size


class Call(NamedTuple):
  """Who connects to whom, and for which epoch. stream: the number of the connection among those of the two members."""

  epoch: int
  caller: int
  listener: int
  stream: int = 0


@dataclasses.dataclass
class _Pending:
  """A connection that has not proved yet that it has the token."""

  sock: socket.socket
  name: str
  challenge: bytes
  deadline: float
  answer: bytes = b""


class Listener:
  """Listens for the peers of member `member`. refused: called with one line for each connection that is refused."""

  def __init__(self, member: int, token: bytes, host: str, refused: Callable[[str], None]) -> None:
    self._member = member
    self._token = token
    self._refused = Sparse(refused)
    self._sock = addresses.listen(host, 0, _BACKLOG)
    self._sock.setblocking(False)
    self.address = addresses.join(host, self._sock.getsockname()[1])
    self._arrivals = threading.Condition()
    self._epoch = -1  # connections of earlier epochs are refused
    self._callers: Collection[tuple[int, int]] = ()
    self._missing: set[tuple[int, int]] = set()  # (member, stream) that have not arrived yet in this epoch
    # (member, stream) -> (epoch, connection), not claimed yet
    self._arrived: dict[tuple[int, int], tuple[int, socket.socket]] = {}
    self._pending: dict[socket.socket, _Pending] = {}
    self._wake, self._waker = socket.socketpair()
    self._selector = selectors.DefaultSelector()
    self._selector.register(self._sock, selectors.EVENT_READ)
    self._selector.register(self._wake, selectors.EVENT_READ)
    self._thread = threading.Thread(target=self._serve, name="exchange-listen", daemon=True)
    self._thread.start()

  def begin(self, epoch: int, callers: Collection[tuple[int, int]]) -> None:
    """Drops connections of earlier epochs, and refuses them from now on. callers: (member, stream) of this epoch."""
    with self._arrivals:
      self._epoch = epoch
      for key, (theirs, sock) in list(self._arrived.items()):
        if theirs < epoch:
          del self._arrived[key]
          sock.close()
      self._callers = callers
      self._missing = {key for key in callers if self._arrived.get(key, (-1, None))[0] != epoch}

  def claim(self, stop: Stop, deadline: float) -> dict[tuple[int, int], socket.socket]:
    """Returns the connections of the callers of the present epoch, as soon as all have arrived. Raises PeerLost with
    the missing members at `deadline` (time.monotonic seconds), and Stopped if `stop` is set."""
    with self._arrivals:
      while self._missing:
        if stop.is_set:
          raise Stopped
        if not self._arrivals.wait(deadline - time.monotonic()) and time.monotonic() >= deadline:
          raise PeerLost({member for member, _ in self._missing}, "no connection within the time limit")
      return {key: self._arrived.pop(key)[1] for key in self._callers}

  def notify(self) -> None:
    """Makes `claim` look at its `stop` again."""
    with self._arrivals:
      self._arrivals.notify_all()

  def close(self) -> None:
    """Ends the thread and closes all connections that were not claimed."""
    self._waker.send(b"c")
    self._thread.join()
    sockets = [self._sock, self._wake, self._waker, *self._pending, *(sock for _, sock in self._arrived.values())]
    for sock in sockets:
      sock.close()
    self._pending.clear()
    self._arrived.clear()
    self._selector.close()

  def _serve(self) -> None:
    while True:
      first = min((pending.deadline for pending in self._pending.values()), default=None)
      timeout = None if first is None else max(0.0, first - time.monotonic())
      for key, _ in self._selector.select(timeout):
        if key.fileobj is self._wake:
          return
        if key.fileobj is self._sock:
          self._accept()
        elif (pending := self._pending.get(key.fileobj)) is not None:  # type: ignore[call-overload]
          self._advance(pending)
      for pending in list(self._pending.values()):
        if pending.deadline <= time.monotonic():
          self._refuse(pending, f"no valid handshake within {HANDSHAKE_SECONDS:g} s")

  def _accept(self) -> None:
    try:
      sock, address = self._sock.accept()
    except BlockingIOError:  # the caller has left already
      return
    except OSError as error:
      self._refused(f"cannot accept a connection: {error}")
      time.sleep(_PAUSE_SECONDS)
      return
    sock.setblocking(False)
    challenge = handshake.make_challenge()
    pending = _Pending(sock, f"{address[0]}:{address[1]}", challenge, time.monotonic() + HANDSHAKE_SECONDS)
    if len(self._pending) >= MOST_PENDING + len(self._callers):
      self._refuse(next(iter(self._pending.values())), f"more than {MOST_PENDING} connections without a handshake")
    self._pending[sock] = pending
    self._selector.register(sock, selectors.EVENT_READ)
    self._send(pending, challenge)

  def _advance(self, pending: _Pending) -> None:
    """Reads a part of the answer, and decides once it is complete."""
    try:
      data = pending.sock.recv(ANSWER_BYTES - len(pending.answer))
    except BlockingIOError:
      return
    except OSError as error:
      self._refuse(pending, str(error))
      return
    pending.answer += data
    if not data:
      self._refuse(pending, "closed before the handshake was complete")
    elif len(pending.answer) == ANSWER_BYTES:
      self._decide(pending)

  def _decide(self, pending: _Pending) -> None:
    checked = handshake.check_answer(self._token, pending.challenge, pending.answer)
    if checked is None:
      self._refuse(pending, "wrong token")
      return
    call = Call(*_CALL.unpack(checked.wish))
    if call.listener != self._member:
      self._refuse(pending, f"member {call.caller} looks for member {call.listener}; this is member {self._member}")
      return
    with self._arrivals:
      earlier = self._arrived.get((call.caller, call.stream))
      if call.epoch < max(self._epoch, earlier[0] if earlier else -1):
        self._refuse(pending, f"member {call.caller} connects for epoch {call.epoch}, which is over")
        return
      if not self._send(pending, checked.proof):
        return
      self._forget(pending)
      self._arrived[call.caller, call.stream] = (call.epoch, pending.sock)
      if earlier:
        earlier[1].close()
      if call.epoch == self._epoch:
        self._missing.discard((call.caller, call.stream))
      elif earlier and earlier[0] == self._epoch:  # not claimed yet, and now closed: the present epoch is over
        self._missing.add((call.caller, call.stream))
      if not self._missing:
        self._arrivals.notify_all()

  def _send(self, pending: _Pending, message: bytes) -> bool:
    """Sends a short message, which fits into the empty buffer of a new connection, or refuses the connection."""
    try:
      sent = pending.sock.send(message)
    except OSError as error:
      self._refuse(pending, str(error))
      return False
    if sent != len(message):
      self._refuse(pending, "the connection accepts no data")
    return sent == len(message)

  def _refuse(self, pending: _Pending, reason: str) -> None:
    self._forget(pending)
    pending.sock.close()
    self._refused(f"refused a connection from {pending.name}: {reason}")

  def _forget(self, pending: _Pending) -> None:
    del self._pending[pending.sock]
    self._selector.unregister(pending.sock)


_Steps = Generator[tuple[socket.socket, int, float], bool, socket.socket]


def dial(token: bytes, peers: Mapping[Call, str], stop: Stop, deadline: float) -> dict[Call, socket.socket]:
  """Makes the connections {call: address of its listener, "host:port"}, several at the same time, each with a handshake
  in both directions.

  Raises Unreachable if one is not made in REACH_SECONDS, PeerLost if a listener refuses or does not prove that it has
  the token, and at `deadline`; Stopped if `stop` is set.
  """
  made: dict[Call, socket.socket] = {}
  waiting: dict[int, tuple[Call, _Steps, float]] = {}  # by descriptor; with the time limit of the step
  poll = select.poll()
  stop.watched_by(poll)

  def advance(call: Call, steps: _Steps, ready: bool | None) -> None:
    try:
      sock, event, until = steps.send(ready)  # type: ignore[arg-type]
    except StopIteration as end:
      made[call] = end.value
    else:
      poll.register(sock, event)
      waiting[sock.fileno()] = call, steps, until

  try:
    left, look_at = iter(peers.items()), 0.0
    while len(made) < len(peers):
      for call, address in itertools.islice(left, _AT_ONCE - len(waiting)):
        advance(call, _connect(token, address, call, deadline), None)
      found = {number: True for number, _ in poll.poll(1000 * _LOOK_SECONDS)}
      if stop.is_set:
        raise Stopped
      if (now := time.monotonic()) >= look_at:
        look_at = now + _LOOK_SECONDS
        found = {number: False for number, (*_, until) in waiting.items() if until <= now} | found
      for number, ready in found.items():
        poll.unregister(number)
        call, steps, _ = waiting.pop(number)
        advance(call, steps, ready)
  except BaseException:
    for _, steps, _ in waiting.values():
      steps.close()
    for sock in made.values():
      sock.close()
    raise
  return made


def _connect(token: bytes, address: str, call: Call, deadline: float) -> _Steps:
  """Makes one connection, in steps: yields (socket, event to wait for, time limit), and gets whether it has come."""
  sock = yield from _reach(address, call.listener, deadline)
  try:
    challenge = yield from _receive(sock, handshake.CHALLENGE_BYTES, deadline)
    made = handshake.make_answer(token, challenge, _CALL.pack(*call))
    if made is None:
      raise ConnectionError("the listener is not a member of a run")
    sock.sendall(made.answer)
    if not hmac.compare_digest((yield from _receive(sock, handshake.PROOF_BYTES, deadline)), made.proof):
      raise ConnectionError("the listener has another token")
  except OSError as error:
    sock.close()
    raise PeerLost([call.listener], f"{address}: {error}") from error
  except GeneratorExit:
    sock.close()
    raise
  return sock


def _reach(address: str, listener: int, deadline: float) -> _Steps:
  """Makes a connection without a handshake. Raises Unreachable."""
  until = min(deadline, time.monotonic() + REACH_SECONDS)
  try:
    family, *_, target = socket.getaddrinfo(*addresses.split(address), type=socket.SOCK_STREAM)[0]
    while True:
      sock = socket.socket(family)
      try:
        sock.setblocking(False)
        error = sock.connect_ex(target)
        if error == errno.EINPROGRESS:
          came = yield sock, select.POLLOUT, min(until, time.monotonic() + _ASK_SECONDS)
          error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) if came else errno.EINPROGRESS
        if error == 0:
          return sock
        if error != errno.EINPROGRESS:
          raise ConnectionError(os.strerror(error))
      except BaseException:
        sock.close()
        raise
      sock.close()
      if time.monotonic() >= until:
        raise TimeoutError("no answer within the time limit")
  except OSError as error:
    raise Unreachable([listener], f"{address}: {error}") from error


def _receive(
  sock: socket.socket, size: int, deadline: float
) -> Generator[tuple[socket.socket, int, float], bool, bytes]:
  data = b""
  while len(data) < size:
    if not (yield sock, select.POLLIN, deadline):
      raise TimeoutError("no answer within the time limit")
    more = sock.recv(size - len(data))
    if not more:
      raise ConnectionError("refused by the listener")
    data += more
  return data
