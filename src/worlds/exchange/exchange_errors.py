"""The errors of the exchange, and what the caller does after each."""

from __future__ import annotations

from collections.abc import Iterable


class PeerLost(RuntimeError):
  """The connections of this epoch are unusable: wait for the next epoch, connect, and repeat the call.

  members: the peers whose connections failed or brought damaged data, ascending. A living peer that has begun a later
  epoch is also among them, so only the supervisor decides who is lost. Empty if `Exchange.interrupt` ended the call.
  """

  def __init__(self, members: Iterable[int], reason: str) -> None:
    self.members = tuple(sorted(members))
    names = ", ".join(map(str, self.members))
    super().__init__(f"lost the connection to member {names}: {reason}" if names else reason)


class Unreachable(PeerLost):
  """No connection to a peer, which may live: the network may be broken. The supervisor decides who goes on."""


class MismatchedCall(RuntimeError):
  """Two members made different calls in one epoch, a defect of the caller. Repeating the call would fail again."""
