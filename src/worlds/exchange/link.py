"""One authenticated TCP connection to a peer, and the frames that it carries."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from worlds.exchange.exchange_errors import MismatchedCall, PeerLost
from worlds.liveness import CHECK_SECONDS, Liveness


class Stopped(Exception):
  """The epoch ended while a thread waited. Never leaves the package."""


class Stop:
  """A flag that a thread can wait for together with a socket. Once set, it stays set."""

  def __init__(self) -> None:
    self._lock = threading.Lock()
    self._read, self._write = os.pipe()
    self._is_set = self._is_closed = False

  @property
  def is_set(self) -> bool:
    return self._is_set

  def set(self) -> None:
    """Wakes all threads that wait now or later. May be called from any thread, also after `close`."""
    with self._lock:
      was_set, self._is_set = self._is_set, True  # before a thread wakes
      if not was_set and not self._is_closed:
        os.write(self._write, b"s")  # never read, so that it wakes every thread

  def watched_by(self, poll: select.poll) -> None:
    """Makes `poll` return once the flag is set."""
    poll.register(self._read, select.POLLIN)

  def close(self) -> None:
    """Releases the descriptors. No thread may wait any more."""
    with self._lock:
      if not self._is_closed:
        os.close(self._read)
        os.close(self._write)
      self._is_closed = True


class Kind(IntEnum):
  """What a frame carries."""

  PIECE = 1  # a share's values of the part of a bucket that the receiver sums
  TOTAL = 2  # the sum of all shares of the part of a bucket that the sender sums
  STATE_HEADER = 3  # JSON that describes the arrays of a state
  STATE_ARRAY = 4  # a chunk of the bytes of one array of a state
  QUESTION = 5  # nothing: whether the host lives
  EPOCH = 6  # nothing: the sender has begun the epoch `call`, and what follows belongs to it


# magic, kind, share or array, bucket or chunk, call, bytes and checksum of the payload. The CRC-32 of these fields
# follows, so that a damaged length is noticed before it is used.
_FIELDS = struct.Struct("<4sIiIQQI")
_CHECKSUM = struct.Struct("<I")
_MAGIC = b"xchg"
_HEADER_BYTES = _FIELDS.size + _CHECKSUM.size
_CHUNK = 1 << 20  # most bytes of one receive
_COLUMNS = (512, 509)  # without a common factor
_SHORT_BYTES = 1 << 16
_NOTHING = memoryview(b"")
_MOST_BUFFERS = 64  # of one send
_KEEP_SECONDS = 60  # without a byte, until the system sends one to keep the connection


def checksum(payload: memoryview) -> int:
  """Returns the CRC-32 of a short payload. Of others, the CRC-32 of the sums of the columns if the bytes are a
  table of 64-bit words, for two numbers of columns, and of the bytes after each last row: a quarter of the time of the
  CRC-32 of all bytes. The sums are modulo 2^64. Two words of the same column of both tables are 2 MiB apart."""
  if len(payload) <= _SHORT_BYTES:
    return zlib.crc32(payload)
  words, number = np.frombuffer(payload, np.uint64, len(payload) // 8), 0
  for columns in _COLUMNS:
    rows = words[: words.size // columns * columns].reshape(-1, columns)
    sums = rows.sum(axis=0, dtype=np.uint64)
    number = zlib.crc32(payload[rows.nbytes :], zlib.crc32(sums.data, number))
  return number


class Frame(NamedTuple):
  """The header of a frame. call: identifies epoch, tag and arguments of the call that sent it."""

  kind: int
  share: int
  bucket: int
  call: int
  length: int
  checksum: int

  @property
  def name(self) -> str:
    return f"{Kind(self.kind).name} {self.share}, {self.bucket}"


class Link:
  """Sends and receives frames. One thread may send while another one receives. Every error of the connection, a dead
  host and a wrong checksum raise PeerLost with the peer's member id. If `stop` is set, waiting raises Stopped.

  `post`, `flush`, `read` and `skip_to` never wait: `Poll` waits for many links at once.
  """

  def __init__(self, member: int, sock: socket.socket, stop: Stop, epoch: int) -> None:
    self.member = member
    self.epoch = epoch  # the newest one that the peer is known to have begun
    self.is_broken = False  # the next epoch needs another connection
    self.unsent = 0  # bytes that were posted and not sent yet
    self.sent = 0  # bytes
    self._sock = sock
    self._stop = stop
    self._waiting: deque[memoryview] = deque()  # the unsent bytes: the rest of a payload, then headers and payloads
    self._header = bytearray(_HEADER_BYTES)
    self._missing = memoryview(self._header)  # what is to be filled next, of the header or of the payload
    self._frame: Frame | None = None  # the one whose payload is being received
    self._payload = _NOTHING  # its memory
    self._discarded = 0  # bytes of a payload of an earlier epoch that have not arrived yet
    self._liveness = Liveness(sock, self._ask)
    self._lock = threading.RLock()  # of the bytes to send
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):  # a firewall may forget a connection that is silent for minutes: local steps
      sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEP_SECONDS)

  def fileno(self) -> int:
    return self._sock.fileno()

  def post(self, kind: Kind, call: int, share: int, bucket: int, payload: memoryview, known: int | None = None) -> None:
    """Adds a frame to what `flush` sends. payload: bytes, which must not change until they are sent. known: their
    checksum, if it is known."""
    number = checksum(payload) if known is None else known
    fields = _FIELDS.pack(_MAGIC, kind, share, bucket, call, len(payload), number)
    with self._lock:
      self._waiting += (memoryview(fields + _CHECKSUM.pack(zlib.crc32(fields))), payload)
      self.unsent += _HEADER_BYTES + len(payload)

  def flush(self) -> bool:
    """Sends what the connection accepts now. Returns whether it accepted everything."""
    with self._lock:
      return self._flush()

  def _flush(self) -> bool:
    while self._waiting:
      try:
        sent = self._sock.sendmsg(itertools.islice(self._waiting, _MOST_BUFFERS))
      except BlockingIOError:
        return False
      except OSError as error:
        raise self._lost(error.strerror or str(error)) from error
      self.unsent -= sent
      self.sent += sent
      while self._waiting and sent >= len(self._waiting[0]):
        sent -= len(self._waiting.popleft())
      if sent:
        self._waiting[0] = self._waiting[0][sent:]
    return True

  def read(self, begin: Callable[[Frame], memoryview]) -> Frame | None:
    """Receives what has arrived of one frame, and returns the frame once all of it has arrived. begin(frame): called
    with the header; returns the memory for the payload, bytes. Raises MismatchedCall if it has another size: no length
    from the network decides how much memory is allocated."""
    while received := self._receive(self._missing):
      self._missing = self._missing[received:]
      if len(self._missing) == 0 and self._frame is None:
        self._begin(begin)
      if len(self._missing) == 0 and (frame := self._frame):
        if checksum(self._payload) != frame.checksum:
          raise self._lost(f"the checksum of {frame.name} is wrong")
        self._frame, self._payload, self._missing = None, _NOTHING, memoryview(self._header)
        return frame
    return None

  def cut(self, is_broken: bool = False) -> None:
    """The epoch is over: the connection uses no memory of its callers any more. Frames that were not begun are dropped.
    The rest of a frame that was begun is copied, to be sent; a payload that was being received is discarded."""
    self.is_broken |= is_broken
    with self._lock:
      begun = len(self._waiting) % 2 or 2 * (self.unsent > 0 and len(self._waiting[0]) < _HEADER_BYTES)
      rest = b"".join(itertools.islice(self._waiting, begun))
      self._waiting, self.unsent = deque([memoryview(rest)] * bool(rest)), len(rest)
    if self._frame:
      self._discarded, self._missing = len(self._missing), memoryview(self._header)
      self._frame, self._payload = None, _NOTHING

  def begin(self, epoch: int, stop: Stop) -> None:
    """Sends the mark of an epoch that this side has begun, or posts it. `skip_to` shows when the peer has begun it."""
    self.cut()
    self._stop = stop
    self.post(Kind.EPOCH, epoch, 0, 0, _NOTHING, known=0)
    self.flush()

  def skip_to(self, epoch: int) -> bool:
    """Discards some bytes that the peer sent before it began this epoch. Returns whether none are left: the peer has
    begun this epoch or a later one."""
    if self._discarded:
      self._discarded -= self._receive(memoryview(bytearray(min(self._discarded, _CHUNK))))
    elif self.epoch < epoch:
      self._missing = self._missing[self._receive(self._missing) :]
      if len(self._missing) == 0:
        self._discarded = self._next_header().length
    return self.epoch >= epoch and not self._discarded

  def send(self, kind: Kind, call: int, share: int, bucket: int, payload: memoryview, known: int | None = None) -> None:
    """Posts a frame, and returns when it is sent."""
    self.post(kind, call, share, bucket, payload, known)
    while not self.flush():
      self._wait(select.POLLOUT)

  def receive(self, begin: Callable[[Frame], memoryview]) -> Frame:
    """Waits for the next frame, with `begin` as in `read`."""
    while True:
      if self._stop.is_set:
        raise Stopped
      if frame := self.read(begin):
        return frame
      self._wait(select.POLLIN)

  def check(self) -> None:
    """Raises PeerLost if the peer's host is dead. To be called several times a second while a thread waits."""
    if self._liveness.is_dead():
      raise self._lost("the peer's host does not answer")

  @property
  def speed(self) -> tuple[float, float] | None:
    """As `Liveness.speed`."""
    return self._liveness.speed()

  def _ask(self) -> None:
    with self._lock:
      if not self.unsent:
        self.post(Kind.QUESTION, 0, 0, 0, _NOTHING)
        self._flush()

  def _wait(self, event: int) -> None:
    """Returns when `event` (select.POLLIN or POLLOUT) or an error is pending, or from time to time."""
    poll = select.poll()
    self._stop.watched_by(poll)
    poll.register(self._sock, event)
    ready = poll.poll(1000 * CHECK_SECONDS)
    if self._stop.is_set:
      raise Stopped
    if not ready:
      self.check()

  def wait_closed(self, seconds: float) -> None:
    """Returns when the peer has closed the connection, or after `seconds`. Drops what it still sends."""
    deadline, self.is_broken = time.monotonic() + seconds, True
    poll = select.poll()
    poll.register(self._sock, select.POLLIN)
    with contextlib.suppress(PeerLost):
      while (left := deadline - time.monotonic()) > 0:
        if poll.poll(1000 * left):
          self._receive(memoryview(bytearray(_CHUNK)))

  def close(self) -> None:
    self._sock.close()

  def _receive(self, into: memoryview) -> int:
    """Receives bytes that have arrived, and returns how many; 0: none."""
    try:
      received = self._sock.recv_into(into[:_CHUNK])
    except BlockingIOError:
      return 0
    except OSError as error:
      raise self._lost(error.strerror or str(error)) from error
    if received == 0:
      raise self._lost("the peer closed the connection")
    return received

  def _next_header(self) -> Frame:
    magic, *fields = _FIELDS.unpack_from(self._header)
    (number,) = _CHECKSUM.unpack_from(self._header, _FIELDS.size)
    if magic != _MAGIC or number != zlib.crc32(self._header[: _FIELDS.size]):
      raise self._lost("the header of a frame is damaged")
    frame, self._missing = Frame(*fields), memoryview(self._header)
    if frame.kind == Kind.EPOCH:
      self.epoch = max(self.epoch, frame.call)
    return frame

  def _begin(self, begin: Callable[[Frame], memoryview]) -> None:
    """The header has arrived: prepares for the payload."""
    frame = self._next_header()
    if frame.kind == Kind.QUESTION:
      return
    if frame.kind == Kind.EPOCH:
      raise PeerLost([self.member], f"the peer has begun epoch {frame.call}")
    into = begin(frame)
    if frame.length != len(into):
      raise MismatchedCall(
        f"Member {self.member} sent {frame.length} bytes of {frame.name}; {len(into)} bytes are expected. Use equal "
        "layouts and dtypes on all members."
      )
    self._frame, self._payload, self._missing = frame, into, into

  def _lost(self, reason: str) -> PeerLost:
    self.is_broken = True
    return PeerLost([self.member], reason)


class Poll:
  """Waits for several links at once. For one thread, except for `wake`."""

  def __init__(self, stop: Stop) -> None:
    self._stop = stop
    self._links: dict[int, Link] = {}
    self._events: dict[int, int] = {}
    self._poll = select.poll()
    stop.watched_by(self._poll)
    self._read, self._write = os.pipe()
    os.set_blocking(self._read, False)
    self._poll.register(self._read, select.POLLIN)
    self._is_woken = False
    self._check_at = 0.0

  def watch(self, link: Link, reads: bool, writes: bool) -> None:
    """From now on `wait` returns the link when it has bytes to read (`reads`) or accepts bytes (`writes`)."""
    number, events = link.fileno(), select.POLLIN * reads | select.POLLOUT * writes
    if events == self._events.get(number, 0):
      return
    self._links[number], self._events[number] = link, events
    if events:
      self._poll.register(number, events)
    else:
      self._poll.unregister(number)

  def wake(self) -> None:
    """Makes `wait` return, now or when it is called next. May be called from any thread."""
    if not self._is_woken:
      self._is_woken = True
      os.write(self._write, b"w")

  def wait(self) -> tuple[list[Link], list[Link]]:
    """Returns the links that can be read, and those that accept bytes, or none from time to time; a broken link is
    among both. Raises Stopped, and PeerLost if a link's host is dead."""
    ready = self._poll.poll(1000 * CHECK_SECONDS)
    if self._stop.is_set:
      raise Stopped
    if (now := time.monotonic()) >= self._check_at:
      self._check_at = now + CHECK_SECONDS
      for number, events in self._events.items():
        if events:
          self._links[number].check()
    readable, writable = [], []
    for number, events in ready:
      if number == self._read:
        os.read(self._read, _CHUNK)
        self._is_woken = False  # after the read, so that a call of `wake` in between loses nothing
        continue
      wanted = self._events[number]
      if not events & ~(select.POLLIN | select.POLLOUT):  # otherwise the connection is broken: the link says how
        wanted &= events
      readable += [self._links[number]] * bool(wanted & select.POLLIN)
      writable += [self._links[number]] * bool(wanted & select.POLLOUT)
    return readable, writable

  def close(self) -> None:
    """Releases the descriptors. No thread may use it any more."""
    os.close(self._read)
    os.close(self._write)
