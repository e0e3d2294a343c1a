"""How two members prove to each other that both have the job's token, before any other byte is read.

    listener -> caller   challenge: magic, nonce of the listener
    caller -> listener   answer: nonce of the caller, epoch, member ids of caller and listener, stream, HMAC
    listener -> caller   proof: HMAC

Both HMACs cover both nonces, so a recorded handshake is useless later. All messages have a fixed size. Frames after the
handshake have checksums but are neither signed nor encrypted, so the network between slices must be private.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from typing import NamedTuple

_MAGIC = b"exchang4"  # the last character is the version
NONCE_BYTES = 16
TOKEN_BYTES = 16  # the least
_CALL = struct.Struct("<QIIH")
_MAC_BYTES = 32

CHALLENGE_BYTES = len(_MAGIC) + NONCE_BYTES
ANSWER_BYTES = NONCE_BYTES + _CALL.size + _MAC_BYTES
PROOF_BYTES = _MAC_BYTES


class Call(NamedTuple):
  """Who connects to whom, and for which epoch. stream: the number of the connection among those of the two members."""

  epoch: int
  caller: int
  listener: int
  stream: int = 0


def make_challenge() -> tuple[bytes, bytes]:
  """Returns the message of a listener and the fresh nonce in it."""
  nonce = secrets.token_bytes(NONCE_BYTES)
  return _MAGIC + nonce, nonce


def make_answer(token: bytes, challenge: bytes, call: Call) -> tuple[bytes, bytes] | None:
  """Returns the caller's message and the proof that it expects, or None if `challenge` is not of this protocol."""
  if not challenge.startswith(_MAGIC):
    return None
  theirs, mine = challenge[len(_MAGIC) :], secrets.token_bytes(NONCE_BYTES)
  answer = mine + _CALL.pack(*call) + _mac(token, b"caller", theirs, mine, call)
  return answer, _mac(token, b"listener", theirs, mine, call)


def check_answer(token: bytes, nonce: bytes, answer: bytes) -> tuple[Call, bytes] | None:
  """Returns what the caller wants and the proof to send, or None if the caller does not have the token."""
  theirs = answer[:NONCE_BYTES]
  call = Call(*_CALL.unpack_from(answer, NONCE_BYTES))
  if not hmac.compare_digest(answer[-_MAC_BYTES:], _mac(token, b"caller", nonce, theirs, call)):
    return None
  return call, _mac(token, b"listener", nonce, theirs, call)


def _mac(token: bytes, role: bytes, listener_nonce: bytes, caller_nonce: bytes, call: Call) -> bytes:
  """The role differs per direction, so that a message cannot be sent back to its author."""
  return hmac.digest(token, role + listener_nonce + caller_nonce + _CALL.pack(*call), "sha256")
