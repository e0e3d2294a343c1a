"""How both ends of a connection prove to each other that they have the job's token, before any other byte is read.

    listener -> caller   challenge: magic, nonce of the listener
    caller -> listener   answer: nonce of the caller, wish, HMAC
    listener -> caller   proof: HMAC

wish: what the caller wants, of a size that both know; b"" where there is nothing to say. Both HMACs cover both nonces,
so a recorded handshake is useless later, and a role, so that a message cannot be sent back to its author. These
functions neither send nor receive, so they serve blocking and non-blocking sockets.
"""

from __future__ import annotations

import hmac
import secrets
from typing import NamedTuple

_MAGIC = b"worlds01"  # the last characters are the version
_NONCE_BYTES = 16
_ROLES = (b"caller", b"listener", b"key")
PROOF_BYTES = 32
CHALLENGE_BYTES = len(_MAGIC) + _NONCE_BYTES
ANSWER_BYTES = _NONCE_BYTES + PROOF_BYTES  # and the wish
TOKEN_BYTES = 16  # the least


class Handshake(NamedTuple):
  """One handshake. key: a secret of this connection."""

  answer: bytes
  wish: bytes
  proof: bytes
  key: bytes


def make_challenge() -> bytes:
  """Returns a new message of a listener."""
  return _MAGIC + secrets.token_bytes(_NONCE_BYTES)


def make_answer(token: bytes, challenge: bytes, wish: bytes = b"") -> Handshake | None:
  """Returns the answer to a challenge, and the proof that must follow; None if it is no challenge of this protocol."""
  if not challenge.startswith(_MAGIC):
    return None
  return _handshake(token, challenge, secrets.token_bytes(_NONCE_BYTES) + wish)


def check_answer(token: bytes, challenge: bytes, answer: bytes) -> Handshake | None:
  """Returns what the caller wants, and the proof to send; None if the caller does not have the token."""
  made = _handshake(token, challenge, answer[:-PROOF_BYTES])
  return made if hmac.compare_digest(answer, made.answer) else None


def _handshake(token: bytes, challenge: bytes, said: bytes) -> Handshake:
  """said: the answer without its HMAC."""
  caller, listener, key = (hmac.digest(token, role + challenge + said, "sha256") for role in _ROLES)
  return Handshake(said + caller, said[_NONCE_BYTES:], listener, key)
