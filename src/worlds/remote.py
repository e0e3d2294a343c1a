"""The processes of the members on another host, as the supervisor sees them: an agent there obeys its messages."""

from __future__ import annotations

from collections.abc import Callable

from worlds.membership.messages import FROM_AGENT, check, message
from worlds.membership.wire import Channel


class RemoteWorkers:
  """The members of one agent. Has the methods of `Workers` that a supervisor calls; all may be called from any thread.
  They raise nothing: an agent that cannot be reached is lost with its members, whose own connections say so."""

  def __init__(self, channel: Channel, members: frozenset[int], host: str) -> None:
    """host: where other members reach these members."""
    self._channel = channel
    self.members, self.host = members, host

  def send(self, kind: str, **fields: object) -> None:
    """Sends one message to the agent."""
    try:
      self._channel.send(message(kind, **fields))
    except BlockingIOError:  # it does not read
      self._channel.close()
    except OSError:
      pass

  def serve(self, ended: Callable[[int, int], None]) -> None:
    """Returns when the connection has ended. ended(member, code): a member has ended. Raises ValueError for a message
    that no agent would send, and WireError."""
    while (received := self._channel.receive()) is not None:
      check(received, FROM_AGENT)
      if received["kind"] != "ended" or received["member"] not in self.members:
        raise ValueError(f"sent {received}, and has the members {sorted(self.members)}")
      ended(received["member"], received["code"])

  def restart(self, member: int, *, progress: bool) -> None:
    """Starts the member again after a pause."""
    self.send("restart", member=member, progress=progress)

  def kill(self, member: int) -> None:
    """Ends the member's processes at once."""
    self.send("kill", member=member)

  def fault(self, action: str, member: int, seconds: float | None) -> None:
    """Causes a rehearsed fault."""
    self.send("act", action=action, member=member, seconds=seconds)

  def close(self, number: int, seconds: float, code: int) -> None:
    """Ends the agent and its processes. Does not wait for them."""
    self.send("close", number=number, seconds=seconds, code=code)
