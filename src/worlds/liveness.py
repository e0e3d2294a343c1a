"""Whether the host at the other end of a TCP connection is dead: no packet comes back, and nobody refuses.

The other system acknowledges what it receives, also while the process there is busy or stopped. On Linux; elsewhere no
host is ever found dead.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
import time
from collections.abc import Callable

CHECK_SECONDS = 0.05  # from one check to the next
_ASK_SECONDS = 0.5  # without a packet: then the other system is asked
_SILENT_SECONDS = 1.2  # without a packet: a host that pauses for a second lives
_UNANSWERED_SECONDS = 0.25  # that repeated packets get no answer: a busy system answers late
_MOST_LATE_SECONDS = 0.1  # that one check adds to this time: where checks come late, answers come late too
_FRESH_SECONDS = 1.0  # an earlier check says nothing after so long
_INFO = struct.Struct("=8B24I4Q6IQ")  # the beginning of tcp_info of Linux
_RETRANSMITS, _BACKOFF, _UNACKED = 2, 4, 12  # indices of its fields
_LAST_SENT, _LAST_DATA, _LAST_ACK = 17, 19, 20  # milliseconds since then
_MIN_ROUND_TRIP, _DELIVERY_RATE = 39, 42  # microseconds; bytes per second


class Liveness:
  """Watches one connection."""

  def __init__(self, sock: socket.socket, ask: Callable[[], None]) -> None:
    """ask(): sends a few bytes, which the other side ignores, if no bytes wait to be sent. Their loss is repeated by
    the system, so one lost packet is no dead host."""
    self._sock, self._ask = sock, ask
    self._checked, self._unanswered = 0.0, 0.0
    self._is_watched = False  # a process on this host has no other host
    with contextlib.suppress(OSError):  # it is broken
      self._is_watched = sys.platform == "linux" and sock.getpeername()[:1] != sock.getsockname()[:1]

  def speed(self) -> tuple[float, float] | None:
    """The shortest round trip in seconds and the bytes per second that the system has seen. None: the same host, or not
    known."""
    info = self._info()
    is_known = info and info[_DELIVERY_RATE]
    return (1e-6 * info[_MIN_ROUND_TRIP], float(info[_DELIVERY_RATE])) if is_known else None

  def _info(self) -> tuple[int, ...]:
    """What the system knows of the connection; (): nothing, or it is a connection to this host."""
    if not self._is_watched:
      return ()
    try:
      found = self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    except OSError:  # closed: another thread has noticed the end
      return ()
    return _INFO.unpack(found.ljust(_INFO.size, b"\0"))  # an older system does not have the last fields

  def is_dead(self) -> bool:
    """Whether the other host is dead, as this call and earlier calls show: call it several times a second."""
    if not (info := self._info()):
      return False
    now, silent = time.monotonic(), min(info[_LAST_DATA], info[_LAST_ACK]) / 1000
    late, self._checked = now - self._checked, now
    # A system without room for the bytes answers each time that they are repeated, and the pauses between grow.
    if not info[_RETRANSMITS] or info[_LAST_SENT] / 1000 >= silent:
      self._unanswered = 0.0
      if silent > _ASK_SECONDS and not info[_UNACKED] and not info[_BACKOFF]:  # backoff: the buffer there is full
        self._ask()
      return False
    self._unanswered = min(late, _MOST_LATE_SECONDS) + (self._unanswered if late < _FRESH_SECONDS else 0.0)
    return silent >= _SILENT_SECONDS and self._unanswered >= _UNANSWERED_SECONDS
