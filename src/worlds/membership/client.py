"""The member's side of the connection to the supervisor."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable

from worlds.membership.messages import FROM_SUPERVISOR, Message, check, message
from worlds.membership.wire import Channel, WireError
from worlds.place import Place

_BEAT_SECONDS = 0.5
_INTERRUPTING = ("lead", "world", "hold", "regather", "interrupt", "end")


class SupervisorLost(Exception):
  """The supervisor's connection has ended: nothing can be committed any more."""


class Membership:
  """This process as a member: reports what it has done, and receives the supervisor's decisions in their order."""

  def __init__(
    self,
    channel: Channel,
    place: Place,
    address: str,
    interrupt: Callable[[int], None],
    warn: Callable[[str], None],
  ) -> None:
    """channel: to the supervisor. address: where the exchange of this process listens. interrupt(epoch): ends exchanges
    of epochs before this one; called from a thread when the members change. warn takes a line for people."""
    self.member = place.member
    self.connected = True
    self.stop_asked = False  # the supervisor has SIGTERM
    self.interrupted = False  # the interruptible round under way ends; the message is perhaps not handled yet
    self._interrupt, self._warn = interrupt, warn
    self._epoch = 0  # of the newest message, perhaps not handled yet
    self._busy: Callable[[], str] = lambda: ""
    self._noticed: Callable[[], bool] = lambda: False
    self._lost: Callable[[], None] = lambda: None
    self._messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
    self._channel = channel
    self.send("hello", member=place.member, lane=place.lane, lanes=place.lanes, address=address)
    self._closed = threading.Event()
    self._receiver = threading.Thread(target=self._receive, name="messages of the supervisor", daemon=True)
    self._receiver.start()
    self._beats = threading.Thread(target=self._beat, name="signs of life", daemon=True)
    self._beats.start()

  def watch(self, *, busy: Callable[[], str], noticed: Callable[[], bool], lost: Callable[[], None]) -> None:
    """busy(): what this process does besides steps, "" if nothing. noticed(): whether it has SIGTERM. Both are asked
    for every sign of life. lost(): called from a thread when the connection has ended, and `close` did not end it."""
    self._busy, self._noticed, self._lost = busy, noticed, lost
    if not self.connected:
      lost()

  def send(self, kind: str, **fields: object) -> None:
    """Sends one message. A broken connection is not reported here: `next` raises SupervisorLost."""
    with contextlib.suppress(OSError):
      self._channel.send(message(kind, **fields))

  def next(self, timeout: float | None = None) -> Message | None:
    """The supervisor's next message; None after `timeout` seconds. Raises SupervisorLost at the end of the stream."""
    try:
      received = self._messages.get(timeout=timeout) if timeout != 0 else self._messages.get_nowait()
    except queue.Empty:
      return None
    if received is None:
      self._messages.put(None)
      raise SupervisorLost("the connection to the supervisor has ended")
    return received

  def close(self) -> None:
    """Ends the connection and its threads."""
    self._closed.set()
    self._channel.close()
    self._beats.join(2 * _BEAT_SECONDS)
    self._receiver.join(2 * _BEAT_SECONDS)

  def _receive(self) -> None:
    try:
      while (received := self._channel.receive()) is not None:
        check(received, FROM_SUPERVISOR)
        if received["kind"] == "stop":
          self.stop_asked = True
          continue
        self.interrupted = self.interrupted or received["kind"] == "interrupt"
        if "lost" in received:  # read later: seconds become times on the monotonic clock of this process
          now = time.monotonic()
          received["lost"] = {member: (why, now - seconds) for member, (why, seconds) in received["lost"].items()}
        self._messages.put(received)
        if received["kind"] in _INTERRUPTING:
          self._epoch = received.get("epoch", self._epoch + 1)
          self._interrupt(self._epoch)
    except (WireError, ValueError) as error:
      self._warn(f"The supervisor {error}. Its connection is closed.")
      self._channel.close()
    self.connected = False
    self._messages.put(None)
    self._interrupt(self._epoch + 1)
    if not self._closed.is_set():
      self._lost()

  def _beat(self) -> None:
    leaves = False
    while not self._closed.wait(_BEAT_SECONDS) and self.connected:
      self.send("beat", busy=self._busy())
      if self._noticed() and not leaves:
        leaves = True
        self.send("leave")
