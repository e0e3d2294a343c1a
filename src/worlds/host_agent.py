"""The slices of one host of a run whose supervisor is on another host."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from worlds import lines
from worlds.exit_codes import FAILED, INTERRUPTED, PREEMPTED
from worlds.interruptions import Repeats, handled
from worlds.membership import wire
from worlds.membership.messages import TO_AGENT, Message, check, message
from worlds.membership.wire import Channel, Refused, WireError
from worlds.place import Place
from worlds.worker_processes import MemberProgram, Workers

_RETRY_SECONDS = 0.5
_INTERRUPT_SECONDS = 5.0


class Agent:
  def __init__(
    self, program: MemberProgram, supervisor: str, token: bytes, *, slices: int, host: str, wait_seconds: float
  ) -> None:
    """program: its arguments come from the supervisor. supervisor: host:port. host: where other members reach this
    host; "": where the supervisor is reached from."""
    self._program, self._supervisor, self._token = program, supervisor, token
    self._slices, self._host = slices, host
    self._wait_seconds = wait_seconds
    self._channel: Channel | None = None
    self._workers: Workers | None = None  # while a supervisor is served
    self._signal, self._repeats = 0, Repeats()  # the signal that ends the agent
    self._kill_signal = 0  # a second one, which ends it without a save
    self._failed = False

  def run(self) -> int:
    """Serves one supervisor after the other. Returns the exit code of the run, or 42 if the agent has to end before.
    Raises TimeoutError if no supervisor answers at first, and Refused if it does not accept the token."""
    with handled(self._signalled, self._fail):
      self._join()
      while self._channel is not None:
        code = self._serve(self._channel)
        if code is not None:
          return code
        if not self._signal:
          _log(f"The connection to the supervisor has ended. Waiting up to {self._wait_seconds:g} s for the next one.")
        self._channel = None
        with contextlib.suppress(TimeoutError, Refused):
          self._join()
      if self._failed:
        return FAILED
      if self._kill_signal:
        return 128 + self._kill_signal
      return INTERRUPTED if self._signal == signal.SIGINT else PREEMPTED

  def _join(self) -> None:
    """Connects to the supervisor, unless a signal comes before. After the longest wait, raises TimeoutError, or Refused
    if the supervisor rejected the token in the last attempt."""
    deadline, has_logged_wait = time.monotonic() + self._wait_seconds, False
    while not self._signal:
      try:
        self._channel = wire.connect(self._supervisor, self._token)
      except (OSError, WireError) as error:
        if not has_logged_wait:
          has_logged_wait = True
          _log(f"Waiting for the supervisor at {self._supervisor}: {error}.")
        if time.monotonic() >= deadline:
          kind = Refused if isinstance(error, Refused | WireError) else TimeoutError
          raise kind(f"cannot join within {self._wait_seconds:g} s: {error}") from error
        time.sleep(_RETRY_SECONDS)
      else:
        if self._signal:  # the handler could not close this connection
          self._channel.close()
          self._channel = None
        return

  def _serve(self, channel: Channel) -> int | None:
    """Runs the members that the supervisor gives to this host. Returns the exit code of the run; None: it goes on
    without this agent, or the supervisor is lost."""
    grace = 0.0
    try:
      channel.send(message("agent", slices=self._slices, host=self._host or channel.local_host))
      while (received := channel.receive()) is not None:
        check(received, TO_AGENT)
        if received["kind"] == "close":
          if self._workers is not None:
            self._workers.close(received["number"], received["seconds"])
          return int(received["code"])
        if received["kind"] == "work":
          if self._workers is not None:
            raise ValueError("sent work twice")
          self._workers, grace = self._make_workers(channel, received), received["grace"]
          _log(f"Starting the members {', '.join(map(str, received['members']))}.")
          self._workers.start()
        elif self._workers is not None:
          _follow_order(self._workers, received)
    except (WireError, ValueError) as error:
      _log(f"The supervisor is not understood: it {error}.")
    except OSError:
      pass  # the connection has ended
    finally:
      channel.close()
      if self._workers is not None:
        number = self._signal or signal.SIGTERM
        self._workers.close(number, _INTERRUPT_SECONDS if number == signal.SIGINT else grace)
        self._workers = None
    return None

  def _make_workers(self, channel: Channel, work: Message) -> Workers:
    host = self._host or channel.local_host
    place = Place((self._supervisor,), self._token, 0, lanes=work["lanes"], host=host)

    def ended(member: int, code: int) -> None:
      with contextlib.suppress(OSError):  # the supervisor is lost, as the other thread notices
        channel.send(message("ended", member=member, code=code))

    argv = [str(argument) for argument in work["argv"]]
    program = dataclasses.replace(self._program, run_command=work["run_command"])
    return Workers(program, argv, place, work["members"], ended=ended, log=_log)

  def _fail(self) -> None:
    self._failed = True
    self._signalled(signal.SIGTERM, None)

  def _signalled(self, number: int, frame: FrameType | None) -> None:
    if self._repeats(number) or (number == signal.SIGINT and self._signal not in (0, number)):
      self._kill_signal = number
      if self._workers is not None:
        threading.Thread(target=self._workers.close, args=(signal.SIGKILL, 0.0), name="kill", daemon=True).start()
    self._signal = self._signal or number
    if self._channel is not None:  # in a thread: the main thread may hold the lock of the connection
      threading.Thread(target=self._channel.close, name="stop", daemon=True).start()


def _follow_order(workers: Workers, received: Message) -> None:
  """Carries out a message about one member."""
  member = received["member"]
  if member not in workers.members:
    raise ValueError(f"sent {received}, and this host has the members {sorted(workers.members)}")
  obey: dict[str, Callable[..., None]] = {"restart": workers.restart, "kill": workers.kill, "act": workers.fault}
  obey[received["kind"]](**{name: received[name] for name in TO_AGENT[received["kind"]]})


def _log(line: str) -> None:
  lines.tell(f"agent: {line}")
