"""Authenticated connections that carry JSON messages, in order, between the supervisor and the members of a run.

Both sides prove that they have the job's token before anything else is read (handshake.py). Each message has an
authentication code over its direction and its position, so a message cannot be changed, repeated or left out.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import socket
import struct
import threading
import zlib
from typing import Any

from worlds import addresses, handshake
from worlds.liveness import Liveness

CODE_BYTES = 32
MAX_MESSAGE_BYTES = 1 << 20
HANDSHAKE_SECONDS = 5.0
_LARGE_BYTES, _MOST_UNPACKED_BYTES = 1 << 12, 1 << 23
_READ_BYTES = 1 << 12  # of one call: a short message is one piece
_SEND_BUFFER_BYTES = 1 << 20  # of the supervisor's side, as far as the system allows
_DEAD_SECONDS = 15  # after which a connection ends if the other host answers nothing at all
_LENGTH = struct.Struct("!I")
_QUESTION = {"kind": "alive"}  # whether the other host lives, which its system answers


class WireError(Exception):
  """The other side is not a member of this job, or it broke the protocol."""


class Refused(ConnectionError):
  """The supervisor has ended the connection when this side had shown its token."""


Body = bytes  # a message as it is sent


def encode(message: dict[str, Any]) -> Body:
  """Returns the message as JSON, compressed if that saves much: the addresses of a thousand members are much alike."""
  body = json.dumps(message).encode()
  if len(body) >= _LARGE_BYTES:
    body = zlib.compress(body, 1)
  assert len(body) <= MAX_MESSAGE_BYTES, f"a message of {len(body)} bytes"
  return body


def _unpacked(body: Body) -> bytes:
  """Returns the JSON of a message. Raises ValueError if it would be too large."""
  if body[:1] != b"x":  # with which zlib begins, and no JSON
    return body
  unpacker = zlib.decompressobj()
  text = unpacker.decompress(body, _MOST_UNPACKED_BYTES)
  if not unpacker.eof:
    raise ValueError(f"it has more than {_MOST_UNPACKED_BYTES} bytes, or is cut off")
  return text


class Channel:
  """One authenticated connection. `send` may be called from any thread, `receive` from one."""

  def __init__(self, sock: socket.socket, key: bytes, *, serves: bool) -> None:
    """key: of this connection only. serves: whether this is the supervisor's side."""
    self._socket, self._key, self._serves = sock, key, serves
    self._out, self._in = (b"supervisor", b"member") if serves else (b"member", b"supervisor")
    self._sent = self._received = 0
    self._unread = b""  # bytes that have arrived, perhaps of several messages
    self._lock = threading.Lock()
    self._liveness = Liveness(sock, self._ask)

  def send(self, message: dict[str, Any] | Body) -> None:
    """Sends one message; one for many sides is encoded once, as a Body. Raises OSError if the connection is broken. The
    supervisor's side never waits: it also raises OSError if the other side reads so little that the buffer is full. The
    connection is then useless."""
    body = message if isinstance(message, bytes) else encode(message)
    with self._lock:
      code = _code(self._key, self._out, self._sent, body)
      self._sent += 1
      data = _LENGTH.pack(len(body)) + code + body
      if not self._serves:
        self._socket.sendall(data)
      elif self._socket.send(data, socket.MSG_DONTWAIT) < len(data):
        raise BlockingIOError("the other side does not read")

  def receive(self) -> dict[str, Any] | None:
    """The next message; None if the connection has ended. Raises WireError for bytes that no member would send."""
    while (message := self._receive()) == _QUESTION:
      pass
    return message

  def _receive(self) -> dict[str, Any] | None:
    """As `receive`, but also returns the other side's questions whether this host lives."""
    try:
      (size,) = _LENGTH.unpack(self._read(_LENGTH.size))
      if size > MAX_MESSAGE_BYTES:
        raise WireError(f"announced a message of {size} bytes; at most {MAX_MESSAGE_BYTES} are allowed")
      code = self._read(CODE_BYTES)
      body = self._read(size)
    except OSError:
      return None
    if not hmac.compare_digest(code, _code(self._key, self._in, self._received, body)):
      raise WireError("sent a message with a wrong authentication code")
    self._received += 1
    try:
      message = json.loads(_unpacked(body))
    except (ValueError, RecursionError, zlib.error) as error:
      raise WireError(f"sent a message that is not JSON: {error}") from error
    if not isinstance(message, dict):
      raise WireError("sent a message that is not an object")
    return message

  def _read(self, size: int) -> bytes:
    """Exactly `size` bytes. Raises ConnectionError at the end of the stream."""
    if len(self._unread) < size:
      most = max(size, _READ_BYTES)
      self._unread += _read(self._socket, size - len(self._unread), most - len(self._unread))
    data, self._unread = self._unread[:size], self._unread[size:]
    return data

  def is_dead(self) -> bool:
    """See Liveness."""
    return self._liveness.is_dead()

  def _ask(self) -> None:
    with contextlib.suppress(OSError):  # the thread that reads this connection reports its end
      self.send(_QUESTION)

  @property
  def local_host(self) -> str:
    """The address of this host on the way to the other side."""
    return str(self._socket.getsockname()[0])

  def close(self) -> None:
    """Ends the connection. A thread that waits in `receive` gets None."""
    shut_down(self._socket)
    self._socket.close()


def shut_down(sock: socket.socket) -> None:
  """Ends the connection. A thread that waits for it wakes."""
  with contextlib.suppress(OSError):  # the other side was faster
    sock.shutdown(socket.SHUT_RDWR)


def accept(sock: socket.socket, token: bytes) -> Channel:
  """The supervisor's side of a new connection. Raises WireError if the other side does not have the token. It may take
  for ever: the caller limits the time and shuts the socket down."""
  challenge = handshake.make_challenge()
  try:
    sock.sendall(challenge)
    checked = handshake.check_answer(token, challenge, _read(sock, handshake.ANSWER_BYTES))
    if checked is None:
      raise WireError("does not have the token of this job")
    sock.sendall(checked.proof)
    return _authenticated(sock, checked.key, serves=True)
  except OSError as error:
    raise WireError(f"did not finish the handshake: {error}") from error


def connect(address: str, token: bytes) -> Channel:
  """The member's side: connects to the supervisor at "host:port". Raises OSError if nothing answers there, Refused,
  which is one, if it ends the connection, and WireError if it does not have the token."""
  sock = socket.create_connection(addresses.split(address), timeout=HANDSHAKE_SECONDS)
  try:
    made = handshake.make_answer(token, _read(sock, handshake.CHALLENGE_BYTES))
    if made is None:
      raise WireError(f"what answers at {address} is no supervisor")
    sock.sendall(made.answer)
    try:
      proof = _read(sock, handshake.PROOF_BYTES)
    except ConnectionError as error:
      raise Refused(f"{error}, perhaps because this process has another token") from error
    if not hmac.compare_digest(proof, made.proof):
      raise WireError(f"what answers at {address} does not have the token of this job")
    return _authenticated(sock, made.key, serves=False)
  except BaseException:
    sock.close()
    raise


def _authenticated(sock: socket.socket, key: bytes, *, serves: bool) -> Channel:
  sock.settimeout(None)
  sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
  if serves:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
  # The connection ends if the other host or the network is gone. Elsewhere than on Linux, this takes hours.
  if hasattr(socket, "TCP_USER_TIMEOUT"):
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _DEAD_SECONDS)
  return Channel(sock, key, serves=serves)


def _code(key: bytes, sender: bytes, position: int, body: bytes) -> bytes:
  return hmac.digest(key, sender + struct.pack("!Q", position) + body, hashlib.sha256)


def _read(sock: socket.socket, size: int, most: int = 0) -> bytes:
  """`size` bytes, and as many more up to `most` as have arrived. Raises ConnectionError at the end of the stream."""
  data = bytearray()
  while len(data) < size:
    part = sock.recv(max(size, most) - len(data))
    if not part:
      raise ConnectionError("the connection has ended")
    data += part
  return bytes(data)
