"""The exchange between slices: connections with peers, sums over shares, and the state for a joining member.

The caller is told by the supervisor which members form an epoch and where they listen. `connect` joins them; then all
members call `reduce` with the same tag and dealing. After PeerLost the caller waits for the next epoch, connects, and
calls `reduce` again with the same data, which `reduce` never modifies.

Members that stay keep their connections, and no byte of an earlier epoch can be read in a later one. In `connect` each
side does three things:

1. It drops queued frames, and finishes the frame that is partly sent.
2. It sends the mark of the new epoch.
3. It reads and drops everything up to the peer's mark of this epoch. A mark of a later epoch ends this epoch.

A side closes only broken connections. The peer then reads the end of the connection instead of a mark, and the member
with the higher id connects again. Interrupted in `connect`, `dial` closes its new connections, and the listener closes
connections that nobody has claimed. All streams of a peer are kept, or all are replaced. `connect` waits for a peer
that is late with its mark; the link reports a dead host.

With several processes per slice, process p of a slice exchanges with process p of the other slices: each such group has
its own members and addresses.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from worlds.exchange import peer_state
from worlds.exchange.exchange_errors import PeerLost
from worlds.exchange.layout import HostCopy
from worlds.exchange.link import Link, Poll, Stop, Stopped
from worlds.exchange.listener import Call, Listener, dial
from worlds.exchange.plan import Plan, Wire
from worlds.exchange.reduction import Reduction
from worlds.exchange.thread_pool import ExchangeThreads
from worlds.handshake import TOKEN_BYTES


class Exchange:
  """Connects member `member` with its peers. One thread calls it, except for `interrupt`, which any thread may call,
  and `receive_state` from a member with which the first thread exchanges nothing meanwhile.

  token: secret of the job, at least 16 bytes. host: IP address to listen on, reachable for the peers. connect_seconds:
  time limit of `connect`. streams: connections between two members, the same number on all members; several where one
  does not fill the link. refused: called on another thread with one line for each refused connection; must not raise.
  address: where peers connect, "host:port".
  """

  def __init__(
    self,
    member: int,
    token: bytes,
    refused: Callable[[str], None],
    *,
    host: str = "127.0.0.1",
    connect_seconds: float = 10.0,
    streams: int = 1,
  ) -> None:
    if len(token) < TOKEN_BYTES:
      raise ValueError(f"A job token of {len(token)} bytes is too short. Use secrets.token_bytes({TOKEN_BYTES}).")
    self._member = member
    self._token = token
    self._connect_seconds = connect_seconds
    self._streams = streams
    self._lock = threading.Lock()  # of the next three, which `interrupt` uses
    self._stop = Stop()
    self._epoch = -1
    self._first_allowed = 0  # the oldest epoch that was not interrupted
    self._links: dict[int, list[Link]] = {}  # by member, and by stream
    self._addresses: dict[int, str] = {}  # of the members of the last epoch
    self._incomplete: tuple[Mapping[Call, str], Collection[tuple[int, int]]] | None = None  # see `_complete`
    self._completes = threading.Lock()
    self._dealt: dict[int, tuple[int, ...]] = {}  # of the last sum
    self._plans: dict[tuple[Any, ...], Plan] = {}  # of this dealing: every step needs the same ones
    self._threads = ExchangeThreads()
    self._sent = 0  # bytes, by connections that are closed
    self._listener = Listener(member, token, host, refused)
    self.address = self._listener.address

  def connect(self, epoch: int, peers: Mapping[int, str]) -> None:
    """Connects with the peers of an epoch, {member: address}, this member included. Keeps connections with members that
    stay, and closes all others. Epochs ascend. Raises PeerLost with the members that refuse, cannot be reached or do
    not begin this epoch in time, or have begun a later one, and without members if `interrupt` has named a later epoch.
    """
    self.begin(epoch, peers)
    with self._in_epoch():
      pass

  def begin(self, epoch: int, peers: Mapping[int, str]) -> None:
    """As `connect`, but does not wait for peers that are late: the next call for this epoch does. So this member can
    compute meanwhile."""
    assert self._member in peers and epoch > self._epoch, f"epoch {epoch} after {self._epoch}, members {list(peers)}"
    for member, links in list(self._links.items()):
      if self._addresses[member] != peers.get(member) or any(link.is_broken for link in links):
        self._drop(member)
    with self._lock:
      self._stop.close()
      self._stop, self._epoch = Stop(), epoch
      if epoch < self._first_allowed:
        self._stop.set()
    self._addresses, self._incomplete = dict(peers), None
    streams = [(member, stream) for member in sorted(peers) for stream in range(self._streams)]
    # Of two members, the one with the higher id connects.
    callers = [key for key in streams if key[0] > self._member]
    # It begins with the ids next to it, so that not all members connect to the first one at once.
    calls = {Call(epoch, self._member, m, stream): peers[m] for m, stream in reversed(streams) if m < self._member}
    self._listener.begin(epoch, callers)
    with self._in_epoch():
      for link in itertools.chain(*self._links.values()):
        with contextlib.suppress(PeerLost):  # the connection is broken
          link.begin(epoch, self._stop)
      self._dial(calls, time.monotonic() + self._connect_seconds)
    self._incomplete = calls, callers

  def _complete(self, calls: Mapping[Call, str], callers: Collection[tuple[int, int]]) -> None:
    """Waits for the peers that have not begun this epoch. calls: that this member makes. callers: (member, stream)."""
    deadline = time.monotonic() + self._connect_seconds
    self._await_marks(deadline)
    self._dial(calls, deadline)
    self._listener.begin(self._epoch, [key for key in callers if key[0] not in self._links])
    self._add(self._listener.claim(self._stop, deadline))

  def _dial(self, calls: Mapping[Call, str], deadline: float) -> None:
    missing = {call: address for call, address in calls.items() if call.listener not in self._links}
    made = dial(self._token, missing, self._stop, deadline)
    self._add({(call.listener, call.stream): made[call] for call in sorted(made)})

  def _add(self, made: Mapping[tuple[int, int], socket.socket]) -> None:
    """Connections that both sides have made for this epoch, by member and stream."""
    for (member, _), sock in made.items():
      self._links.setdefault(member, []).append(Link(member, sock, self._stop, self._epoch))

  def _await_marks(self, deadline: float) -> None:
    """Returns when all connections have carried the marks of this epoch. Drops those of a peer if one breaks."""
    waiting = able = set(itertools.chain(*self._links.values()))
    with contextlib.closing(Poll(self._stop)) as poll:
      while waiting:
        for link in able & waiting:
          with contextlib.suppress(PeerLost):  # the connection is broken
            is_sent, has_begun = link.flush(), link.skip_to(self._epoch)
            poll.watch(link, reads=not has_begun, writes=not is_sent)
            waiting -= {link} if is_sent and has_begun else set()
          if link.epoch > self._epoch:
            raise PeerLost([link.member], f"the peer has begun epoch {link.epoch}")
        for member in {link.member for link in waiting if link.is_broken}:
          waiting -= set(self._links[member])
          for link in self._links[member]:
            poll.watch(link, reads=False, writes=False)
          self._drop(member)
        if waiting and time.monotonic() >= deadline:
          raise PeerLost({link.member for link in waiting}, "no sign of this epoch within the time limit")
        able = waiting
        with contextlib.suppress(PeerLost):  # a host is dead
          able = set(itertools.chain(*poll.wait())) if waiting else able

  def reduce(
    self,
    tag: str,
    own: Mapping[int, np.ndarray | HostCopy],
    dealt: Mapping[int, Sequence[int]],
    out: np.ndarray,
    wire: Wire = "float32",
    known: Sequence[tuple[int, int]] = (),
    group: int = 1,
  ) -> None:
    """Fills `out`, float32 [F], with the sum of all shares.

    own: {share: float32 [F]} of this member, read and not modified. dealt: {member: shares} of all members of the
    epoch, each share once; a member may have no shares.

    group: `group` shares from each multiple of `group` on are a group. The sum is computed in float32: the shares of a
    group in ascending order, from left to right, and then so the groups. So it has the same bits for every dealing and
    every number of members. A member sends its shares as `plan.pieces`: the first shares of a group in one piece, which
    the caller may have added already. Then `own` has the sum at the first of these shares, and lacks the others.

    wire: type on the network. With bfloat16, the sum of every group is rounded before the sum of the groups, and the
    total after it, also where nothing is sent. Losses and token counts need float32: reduce them in a call of their
    own.

    known: ranges [start, stop) of the values in the order in which the members compute them, equal on all members. The
    values are exchanged in this order, so that a sum may begin before all values of `own` are computed.

    Raises PeerLost if a connection fails or `interrupt` is called, MismatchedCall if the members disagree, and errors
    of reading `own`, which `interrupt` cannot end. After any error this epoch is over for this member, and `out` is
    undefined. The other connections stay open, so that peers see only the failures that really happened: report the
    error to the supervisor, which ends the epoch for them. There is no time limit: a peer may compile, and the
    supervisor notices a peer that hangs.
    """
    assert dealt.keys() == self._addresses.keys(), f"{list(dealt)}, not the members of the epoch"
    arrays = [out, *(data for data in own.values() if isinstance(data, np.ndarray))]
    assert all(array.dtype == np.float32 and array.ndim == 1 for array in arrays), "arrays must be float32 [F]"
    assert all(data.size == out.size for data in own.values())
    plan = self._plan(dealt, out.size, wire, known, group)
    assert plan.accepts(self._member, own), f"shares {list(own)} of the pieces {plan.pieces[self._member]}"
    with self._in_epoch():
      Reduction(plan, plan.identify(self._epoch, tag), self._member, own, out, self._links, self._stop).run(
        self._threads
      )

  def _plan(
    self, dealt: Mapping[int, Sequence[int]], size: int, wire: Wire, known: Sequence[tuple[int, int]], group: int
  ) -> Plan:
    """The plan of a sum, kept while the shares are dealt in this way."""
    now = {member: tuple(shares) for member, shares in dealt.items()}
    if now != self._dealt:
      self._dealt, self._plans = now, {}
    kind = size, wire, tuple(known), group
    if kind not in self._plans:
      self._plans[kind] = Plan(now, size, wire, known, group)
    return self._plans[kind]

  def send_state(self, member: int, header: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> None:
    """Sends the run's state to a member that has just joined. header: JSON. Raises PeerLost."""
    with self._in_epoch(member):
      peer_state.send(self._links[member][0], self._epoch, header, arrays)

  def receive_state(
    self, member: int, allocate: Callable[[dict[str, Any]], Sequence[np.ndarray]]
  ) -> tuple[dict[str, Any], Sequence[np.ndarray]]:
    """Returns the header and the arrays that `member` sends. allocate(header): returns C-contiguous arrays to fill, of
    the right shapes, or refuses the header with an error. Raises PeerLost, and MismatchedCall if the sender has arrays
    of other sizes."""
    with self._in_epoch(member):
      return peer_state.receive(self._links[member][0], self._epoch, allocate)

  def wait_closed(self, member: int, seconds: float) -> None:
    """Returns when `member` has closed its connection of the last epoch, as a rule because it has ended, or after
    `seconds`. For the end of a run: drops data that `member` still sends."""
    if links := self._links.get(member):
      links[0].wait_closed(seconds)

  def interrupt(self, next_epoch: int) -> None:
    """Ends all epochs before `next_epoch`: a blocked call, and every later call for such an epoch, raises PeerLost. The
    caller's thread need not have connected to the epoch that is now over. Takes a lock: not for signal handlers."""
    with self._lock:
      self._first_allowed = max(self._first_allowed, next_epoch)
      if self._epoch < self._first_allowed:
        self._stop.set()
    self._listener.notify()

  def close(self) -> None:
    """Closes all connections and ends all threads."""
    self._stop.set()
    self._threads.close()
    for member in list(self._links):
      self._drop(member)
    self._listener.close()
    with self._lock:
      self._stop.close()

  @contextlib.contextmanager
  def _in_epoch(self, *members: int) -> Iterator[None]:
    """Raises PeerLost if the present epoch is over, before the block or during it. Every error ends the epoch. members:
    whose connections the block uses; none: all."""
    over = PeerLost([], f"epoch {self._epoch} is over for member {self._member}")
    if self._stop.is_set:
      raise over
    try:
      with self._completes:
        if self._stop.is_set:
          raise Stopped
        if incomplete := self._incomplete:
          self._incomplete = None
          self._complete(*incomplete)
      yield
    except BaseException as error:
      self._stop.set()
      for link in itertools.chain(*(self._links.get(member, ()) for member in members or list(self._links))):
        # A signal may have come between a system call and the record of its bytes.
        link.cut(is_broken=not isinstance(error, PeerLost | Stopped))
      if isinstance(error, Stopped):
        raise over from None
      raise

  @property
  def sent_bytes(self) -> int:
    """What this member has sent to its peers so far, headers included."""
    return self._sent + sum(link.sent for link in itertools.chain(*self._links.values()))

  def speeds(self) -> dict[int, tuple[float, float]]:
    """{member on another host: (seconds of a round trip, bytes per second)}, of its first connection."""
    speeds = {member: links[0].speed for member, links in self._links.items()}
    return {member: speed for member, speed in speeds.items() if speed}

  def _drop(self, member: int) -> None:
    for link in self._links.pop(member):
      self._sent += link.sent
      link.close()
