"""Runs slices of a run on this host, for a supervisor on another host (trainer.launch.local --listen).

  python -m trainer.launch.agent --supervisor HOST:PORT [--slices 1] [--host ADDRESS] [--token-file FILE]

The supervisor says what to run, and decides about restarts. The agent starts the processes, reports at once when one
ends, and kills those that hang. If the connection to the supervisor ends, the processes save and end, and the agent
waits for a supervisor at the same address. If the agent dies, its processes leave in good order, because nobody could
restart or kill them any more.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
import time
from types import FrameType

from trainer import addresses
from trainer.cluster import job_token
from trainer.config.errors import ConfigError
from trainer.launch.workers import Workers
from trainer.membership import wire
from trainer.membership.environment import Place
from trainer.membership.messages import TO_AGENT, Message, check, message
from trainer.membership.wire import Channel, WireError
from trainer.signals import INTERRUPTED, PREEMPTED, requests

BAD_INPUT = 2
_RETRY_SECONDS = 0.5
_INTERRUPT_SECONDS = 5.0


class Agent:
  """The slices of one host."""

  def __init__(self, supervisor: str, token: bytes, *, slices: int, host: str, wait_seconds: float) -> None:
    """supervisor: host:port. host: where other members reach this host; "": where the supervisor is reached from."""
    self._supervisor, self._token, self._slices, self._host = supervisor, token, slices, host
    self._wait_seconds = wait_seconds
    self._channel: Channel | None = None
    self._signal = 0  # that ends the agent

  def run(self) -> int:
    """Serves one supervisor after the other. Returns the exit code of the run, or 42 if the agent has to end before.

    Raises ConfigError if no supervisor answers at first.
    """
    handlers = {number: signal.signal(number, self._signalled) for number in (*requests(), signal.SIGINT)}
    try:
      self._channel = self._join()
      while self._channel is not None:
        code = self._serve(self._channel)
        if code is not None:
          return code
        _log(f"The connection to the supervisor has ended. Waiting up to {self._wait_seconds:g} s for the next one.")
        with contextlib.suppress(ConfigError):
          self._channel = None
          self._channel = self._join()
      return INTERRUPTED if self._signal == signal.SIGINT else PREEMPTED
    finally:
      for number, handler in handlers.items():
        signal.signal(number, handler)

  def _join(self) -> Channel | None:
    """A connection to the supervisor; None after a signal. Raises ConfigError after the longest wait."""
    deadline, told = time.monotonic() + self._wait_seconds, False
    while not self._signal:
      try:
        return wire.connect(self._supervisor, self._token)
      except (OSError, WireError) as error:
        if not told:
          told = True
          _log(f"Waiting for the supervisor at {self._supervisor}: {error}.")
        if time.monotonic() >= deadline:
          raise ConfigError(
            f"--supervisor {self._supervisor}: cannot join within {self._wait_seconds:g} s: {error}.\nStart `python -m "
            "trainer.launch.local --listen HOST:PORT` there, with the same token, and let this host reach the port."
          ) from error
      time.sleep(_RETRY_SECONDS)
    return None

  def _serve(self, channel: Channel) -> int | None:
    """Runs the members that the supervisor gives to this host. Returns the exit code of the run; None: it goes on
    without this agent, or the supervisor is lost."""
    workers, grace = None, 0.0
    try:
      channel.send(message("agent", slices=self._slices, host=self._host or channel.local_host))
      while (received := channel.receive()) is not None:
        check(received, TO_AGENT)
        if received["kind"] == "close":
          if workers is not None:
            workers.close(received["number"], received["seconds"])
          return int(received["code"])
        if received["kind"] == "work":
          if workers is not None:
            raise ValueError("sent work twice")
          workers, grace = self._workers(channel, received), received["grace"]
          _log(f"Starting the members {', '.join(map(str, received['members']))}.")
          workers.start()
        elif workers is not None:
          _obey(workers, received)
    except (OSError, WireError, ValueError) as error:
      _log(f"The supervisor is not understood: it {error}.")
    finally:
      channel.close()
      if workers is not None:
        number = self._signal or signal.SIGTERM
        workers.close(number, _INTERRUPT_SECONDS if number == signal.SIGINT else grace)
    return None

  def _workers(self, channel: Channel, work: Message) -> Workers:
    host = self._host or channel.local_host
    place = Place((self._supervisor,), self._token, 0, lanes=work["lanes"], host=host)

    def ended(member: int, code: int) -> None:
      with contextlib.suppress(OSError):  # the supervisor is lost, as the other thread notices
        channel.send(message("ended", member=member, code=code))

    return Workers([str(argument) for argument in work["argv"]], place, work["members"], ended=ended, log=_log)

  def _signalled(self, number: int, frame: FrameType | None) -> None:
    self._signal = number
    if self._channel is not None:  # in a thread: the main thread may hold the lock of the connection
      threading.Thread(target=self._channel.close, name="stop", daemon=True).start()


def _obey(workers: Workers, received: Message) -> None:
  """Carries out a message about one member."""
  member = received["member"]
  if member not in workers.members:
    raise ValueError(f"sent {received}, and this host has the members {sorted(workers.members)}")
  if received["kind"] == "restart":
    workers.restart(member, progress=received["progress"])
  elif received["kind"] == "kill":
    workers.kill(member)
  else:
    workers.fault(received["action"], member, received["seconds"])


def main(argv: list[str] | None = None) -> int:
  """Runs the command and returns its exit code."""
  parser = argparse.ArgumentParser(
    prog="python -m trainer.launch.agent", description="Run slices on this host.", allow_abbrev=False
  )
  parser.add_argument("--supervisor", metavar="HOST:PORT", required=True, help="what trainer.launch.local listens on")
  parser.add_argument("--slices", type=int, default=1, help="slices of this host (default: 1)")
  parser.add_argument("--host", default="", help="this host's address for the others (default: that of the connection)")
  parser.add_argument("--token-file", default="", help="file with the token (default: variable TRAINER_TOKEN)")
  parser.add_argument("--wait-seconds", type=float, default=300.0, help="longest wait for the supervisor (300)")
  options = parser.parse_args(argv)
  try:
    try:
      addresses.split(options.supervisor)
    except ValueError as error:
      raise ConfigError(f"--supervisor {options.supervisor}: {error}.") from error
    if options.slices < 1:
      raise ConfigError(f"--slices {options.slices}: it must be at least 1.")
    agent = Agent(
      options.supervisor,
      job_token(options.token_file),
      slices=options.slices,
      host=options.host,
      wait_seconds=options.wait_seconds,
    )
    return agent.run()
  except ConfigError as error:
    print(f"error: {error}", file=sys.stderr)
    return BAD_INPUT


def _log(line: str) -> None:
  print(f"agent: {line}", flush=True)


if __name__ == "__main__":
  sys.exit(main())
