"""Whether the host at the other end of a TCP connection is dead: no packet comes back, and nobody refuses.

The other system acknowledges what it receives, and answers the probes of a connection without data, also while the
process there is busy or stopped. On Linux; elsewhere no host is ever found dead.
"""

from __future__ import annotations

import socket
import struct
import sys
import time

CHECK_SECONDS = 0.05  # from one check to the next
_SILENT_SECONDS = 1.0  # without a packet; then the system sends a probe
_UNANSWERED_SECONDS = 0.25  # that a probe or a repeated packet waits at least: a busy system answers late
_FRESH_SECONDS = 1.0  # an earlier check says nothing after so long
_INFO = struct.Struct("=8B13I")  # the beginning of tcp_info of Linux
_RETRANSMITS, _PROBES, _BACKOFF, _LAST_DATA, _LAST_ACK = 2, 3, 4, 19, 20  # indices of its fields; times in milliseconds


class Liveness:
  """Watches one connection."""

  def __init__(self, sock: socket.socket) -> None:
    self._sock = sock
    self._checked = self._unanswered_since = -_FRESH_SECONDS
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
      sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, round(_SILENT_SECONDS))
      sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, round(_SILENT_SECONDS))

  def is_dead(self) -> bool:
    """Whether the other host is dead, as this call and earlier calls show: call it several times a second."""
    if sys.platform != "linux":
      return False
    try:
      info = _INFO.unpack(self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size))
    except OSError:  # closed: another thread has noticed the end
      return False
    # With a backoff, the probes ask whether a full buffer there has room again: such an answer may be left out.
    asked = info[_RETRANSMITS] > 1 or (info[_PROBES] and not info[_BACKOFF])
    if not asked or min(info[_LAST_DATA], info[_LAST_ACK]) < 1000 * _SILENT_SECONDS:
      self._checked = -_FRESH_SECONDS
      return False
    now = time.monotonic()
    if now - self._checked >= _FRESH_SECONDS:
      self._unanswered_since = now
    self._checked = now
    return now - self._unanswered_since >= _UNANSWERED_SECONDS
