"""One authenticated TCP connection to a peer, and the frames that it carries."""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
import zlib
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from worlds.exchange.errors import MismatchedCall, PeerLost


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
      if not self._is_set and not self._is_closed:
        os.write(self._write, b"s")  # never read, so that it wakes every thread
      self._is_set = True

  def wait(self, sock: socket.socket, event: int, deadline: float | None = None) -> None:
    """Returns when `event` (select.POLLIN or POLLOUT) or an error is pending on `sock`. Raises Stopped if the flag is
    set, and TimeoutError at `deadline` (time.monotonic seconds)."""
    poller = select.poll()
    poller.register(self._read, select.POLLIN)
    poller.register(sock, event)
    milliseconds = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1e3
    ready = poller.poll(milliseconds)
    if self._is_set:
      raise Stopped
    if not ready:
      raise TimeoutError("no answer within the time limit")

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


# magic, kind, share or array, bucket or chunk, call, bytes of the payload, CRC-32 of the payload. The CRC-32 of these
# fields follows, so that a damaged length is noticed before it is used.
_FIELDS = struct.Struct("<4sIiIQQI")
_CHECKSUM = struct.Struct("<I")
_MAGIC = b"xchg"
_DROPPED_BYTES = 1 << 16


class Frame(NamedTuple):
  """The header of a frame. call: identifies epoch, tag and arguments of the call that sent it."""

  kind: int
  share: int
  bucket: int
  call: int
  length: int
  checksum: int


class Link:
  """Sends and receives frames. One thread may send while another one receives. Every error of the connection, and a
  wrong checksum, raises PeerLost with the peer's member id. If `stop` is set, waiting raises Stopped."""

  def __init__(self, member: int, sock: socket.socket, stop: Stop) -> None:
    self.member = member
    self._sock = sock
    self._stop = stop
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

  def send(self, kind: Kind, call: int, share: int, bucket: int, payload: memoryview, checksum: int) -> None:
    """Sends one frame. payload: bytes. checksum: its CRC-32."""
    fields = _FIELDS.pack(_MAGIC, kind, share, bucket, call, len(payload), checksum)
    self._send_all([memoryview(fields + _CHECKSUM.pack(zlib.crc32(fields))), payload])

  def receive(self) -> Frame:
    """Returns the header of the next frame."""
    raw = bytearray(_FIELDS.size + _CHECKSUM.size)
    self._receive_all(memoryview(raw))
    magic, *fields = _FIELDS.unpack_from(raw)
    if magic != _MAGIC or _CHECKSUM.unpack_from(raw, _FIELDS.size)[0] != zlib.crc32(raw[: _FIELDS.size]):
      raise PeerLost([self.member], "the header of a frame is damaged")
    return Frame(*fields)

  def receive_payload(self, frame: Frame, into: memoryview) -> None:
    """Fills `into`, bytes, with the payload. Raises MismatchedCall if the sizes differ: no length from the network
    decides how much memory is allocated."""
    what = f"{Kind(frame.kind).name} {frame.share}, {frame.bucket}"
    if frame.length != len(into):
      raise MismatchedCall(
        f"Member {self.member} sent {frame.length} bytes of {what}; {len(into)} bytes are expected. Use equal layouts "
        "and dtypes on all members."
      )
    self._receive_all(into)
    if zlib.crc32(into) != frame.checksum:
      raise PeerLost([self.member], f"the checksum of {what} is wrong")

  def wait_closed(self, seconds: float) -> None:
    """Returns when the peer has closed the connection, or after `seconds`. Drops what it still sends."""
    deadline = time.monotonic() + seconds
    poll = select.poll()
    poll.register(self._sock, select.POLLIN)
    while (left := deadline - time.monotonic()) > 0:
      try:
        if poll.poll(1000 * left) and not self._sock.recv(_DROPPED_BYTES):
          return
      except BlockingIOError:
        continue
      except OSError:
        return

  def close(self) -> None:
    self._sock.close()

  def _send_all(self, buffers: Sequence[memoryview]) -> None:
    waiting = [buffer for buffer in buffers if len(buffer)]
    while waiting:
      if self._stop.is_set:
        raise Stopped
      try:
        sent = self._sock.sendmsg(waiting)
      except BlockingIOError:
        self._stop.wait(self._sock, select.POLLOUT)
        continue
      except OSError as error:
        raise self._lost(error) from error
      while waiting and sent >= len(waiting[0]):
        sent -= len(waiting.pop(0))
      if sent:
        waiting[0] = waiting[0][sent:]

  def _receive_all(self, into: memoryview) -> None:
    while len(into):
      if self._stop.is_set:
        raise Stopped
      try:
        received = self._sock.recv_into(into)
      except BlockingIOError:
        self._stop.wait(self._sock, select.POLLIN)
        continue
      except OSError as error:
        raise self._lost(error) from error
      if received == 0:
        raise PeerLost([self.member], "the peer closed the connection")
      into = into[received:]

  def _lost(self, error: OSError) -> PeerLost:
    return PeerLost([self.member], error.strerror or str(error))
