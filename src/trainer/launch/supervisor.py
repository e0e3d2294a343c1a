"""Supervises one run: decides about its members with a coordinator, and restarts those that are lost."""

from __future__ import annotations

import secrets
import signal
import threading
from collections.abc import Sequence
from types import FrameType

from trainer.cluster import inherited_environment
from trainer.config.schema import Config
from trainer.launch.ports import free_port
from trainer.launch.workers import Workers
from trainer.membership.environment import Place
from trainer.membership.rules import RunRules
from trainer.membership.server import Server
from trainer.signals import INTERRUPTED

FAILED, BAD_INPUT = 1, 2
_END_SECONDS = 30.0  # from the end of the run to the end of the last process
_INTERRUPT_SECONDS = 5.0
MOST_FAILURES = 2  # lives of one member in a row that end with exit code 1 without a new step


def log(line: str) -> None:
  """Prints a line of the supervisor."""
  print(f"supervisor: {line}", flush=True)


class Supervisor:
  """One run on this host: its supervisor, and the workers of its members."""

  def __init__(self, command: Sequence[str], config: Config, *, spares: int, lanes: int) -> None:
    """command: of a worker. lanes: processes per slice."""
    self._lanes, self._token = lanes, secrets.token_bytes(32)
    self._coordinator = RunRules.of(config).coordinator(secrets.token_hex(6))
    self._server = Server(self._coordinator, self._token, kill=self._kill, fault=self._fault, log=log)
    self._workers = Workers(command, self._environments, range(config.cluster.num_slices + spares), ended=self._ended)
    self._progress: dict[int, str] = {}  # by member: the last committed round when it ended last
    self._failures: dict[int, int] = {}
    self._interrupted = threading.Event()

  def run(self) -> int:
    """Starts the members and supervises them to the end of the run. Returns the exit code of the run."""
    handlers = {number: signal.signal(number, self._signalled) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
      self._workers.start()
      while not self._server.over.wait(0.2) and not self._interrupted.is_set():
        pass
      if self._interrupted.is_set():
        self._workers.close(signal.SIGINT, _INTERRUPT_SECONDS)
        return INTERRUPTED
      for member in self._workers.members - self._server.connected:
        self._workers.kill(member)  # it is just starting
      self._workers.close(0, _END_SECONDS)  # the others end by themselves
      assert self._coordinator.code is not None
      return self._coordinator.code
    finally:
      self._workers.close(signal.SIGKILL, 0.0)
      self._server.close()
      for number, handler in handlers.items():
        signal.signal(number, handler)

  def _environments(self, member: int) -> list[dict[str, str]]:
    coordinator = f"127.0.0.1:{free_port()}" if self._lanes > 1 else ""
    return [
      inherited_environment(
        Place(
          (self._server.address,),
          self._token,
          member,
          lane,
          self._lanes,
          slice_coordinator=coordinator,
        ).environment()
      )
      for lane in range(self._lanes)
    ]

  def _ended(self, member: int, code: int) -> None:
    """A member has ended: it is lost to the run, and starts again unless that makes no sense."""
    reason = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    progress = self._progress.get(member) != self._coordinator.committed
    self._progress[member] = self._coordinator.committed
    self._server.lost(member, reason)
    if self._coordinator.phase == "over" or self._coordinator.stopping or self._interrupted.is_set():
      return
    before = 0 if progress else self._failures.get(member, 0)
    self._failures[member] = before + 1 if code == FAILED else 0
    if code == BAD_INPUT and not self._coordinator.committed:
      self._server.end(BAD_INPUT, "")
    elif self._failures[member] >= MOST_FAILURES:
      self._server.end(FAILED, f"Member {member} has failed {MOST_FAILURES} times without a new step.")
    elif (pause := self._workers.restart(member, progress=progress)) is not None:
      log(f"Member {member} {reason}. Starting it again in {pause:.1f} s.")

  def _kill(self, member: int, reason: str) -> None:
    self._workers.kill(member)

  def _fault(self, action: str, member: int, seconds: float | None) -> None:
    self._workers.fault(action, member, seconds)

  def _signalled(self, number: int, frame: FrameType | None) -> None:
    # Not in the handler: it may have interrupted a thread that holds a lock of the server.
    if number == signal.SIGINT:
      self._interrupted.set()
    else:
      threading.Thread(target=self._server.stop, name="stop", daemon=True).start()
