"""The worker processes of one host: started, watched, killed, and started again after a pause."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from worlds.addresses import free_port
from worlds.place import COMMAND, Place

_NORMAL_EXITS = frozenset({0, 2, 42, 130})
_NOT_STARTED = 1  # as an exit code
_LANE_SECONDS = 60.0  # from such an exit of one process of a member to the end of its other processes


@dataclasses.dataclass(frozen=True)
class MemberProgram:
  """What the processes of a run execute."""

  command: tuple[str, ...]  # without the arguments that are the same on all hosts
  environment: Mapping[str, str]
  run_command: str = ""  # what a person types to start the run again: the processes record it


@dataclasses.dataclass
class _LocalMember:
  """One member of the run on this host, over all its lives."""

  member: int
  processes: list[subprocess.Popen[bytes]] = dataclasses.field(default_factory=list)
  lives: int = 0
  ended: bool = False  # a process of this life has ended, so the others must
  is_down: bool = False  # `restart` was called, and it has not started again yet
  absent_until: float | None = None  # a rehearsed fault keeps it down until then


class Workers:
  """The processes of the members on this host. All methods may be called from any thread."""

  def __init__(
    self,
    program: MemberProgram,
    argv: Sequence[str],
    place: Place,
    members: Sequence[int],
    *,
    ended: Callable[[int, int], None],
    log: Callable[[str], None],
  ) -> None:
    """argv: of the program. place: of member 0, lane 0. ended(member, code): called when a member has ended,
    with the exit code of its first process that ended, or minus the number of the signal. log takes a line."""
    self._command, self._place = [*program.command, *argv], place
    self._variables, self._ended, self._log = {**program.environment, COMMAND: program.run_command}, ended, log
    self._workers = {member: _LocalMember(member) for member in members}
    self._lock = threading.RLock()
    self._closing = False

  @property
  def members(self) -> frozenset[int]:
    """The members of this host, dead or alive."""
    return frozenset(self._workers)

  def start(self) -> None:
    for worker in self._workers.values():
      self._start(worker, 0)

  def _start(self, worker: _LocalMember, life: int) -> None:
    """Starts the member after this life, unless it has started already."""
    with self._lock:
      if self._closing or worker.lives != life:
        return
      worker.lives, worker.processes = life + 1, []
      worker.ended, worker.is_down, worker.absent_until = False, False, None
      try:
        lanes = self._place.lanes
        coordinator = f"127.0.0.1:{free_port()}" if lanes > 1 else ""
        for lane in range(lanes):
          place = dataclasses.replace(self._place, member=worker.member, lane=lane, slice_coordinator=coordinator)
          environment = {**self._variables, **place.environment()}
          # A process group of its own: Ctrl-C in the terminal reaches the supervisor only, which decides.
          started = subprocess.Popen(self._command, env=environment, process_group=0, stdin=subprocess.DEVNULL)
          worker.processes.append(started)
      except OSError as error:  # too many processes, or no memory: it may pass
        self._log(f"Member {worker.member} cannot be started: {error}.")
        worker.ended = True
        _wait_for(worker.processes, 0.0)
        threading.Thread(target=self._ended, args=(worker.member, _NOT_STARTED), daemon=True).start()
        return
      pids = ", ".join(str(process.pid) for process in worker.processes)
      self._log(f"Member {worker.member} is process {pids}.")
      for process in worker.processes:
        name = f"waits for member {worker.member}"
        threading.Thread(target=self._wait, args=(worker, worker.lives, process), name=name, daemon=True).start()

  def _wait(self, worker: _LocalMember, life: int, process: subprocess.Popen[bytes]) -> None:
    """Thread: waits for one process. The first one that ends takes the others of its slice with it."""
    code = process.wait()
    with self._lock:
      if worker.lives != life or worker.ended:
        return
      worker.ended = True
    left = _wait_for(worker.processes, _LANE_SECONDS if code in _NORMAL_EXITS else 0.0)
    if left and code in _NORMAL_EXITS:
      self._log(
        f"Member {worker.member}: {left} processes were killed, {_LANE_SECONDS:g} s after another one had ended."
      )
    self._ended(worker.member, code)

  def restart(self, member: int, seconds: float) -> None:
    """Starts the member again after so many seconds, unless a rehearsed fault says when."""
    with self._lock:
      worker = self._workers[member]
      if worker.absent_until is not None:
        seconds = max(0.0, worker.absent_until - time.monotonic())
      worker.is_down = True
      if seconds < float("inf") and not self._closing:
        self._log(f"Starting member {member} again in {seconds:.1f} s.")
        _after(seconds, self._start, worker, worker.lives)

  def kill(self, member: int) -> None:
    """Ends the member's processes at once, also if they are stopped."""
    self._signal(member, signal.SIGKILL)

  def _signal(self, member: int, number: int) -> None:
    with self._lock:
      for process in self._workers[member].processes:
        if process.poll() is None:
          process.send_signal(number)

  def fault(self, action: str, member: int, seconds: float | None) -> None:
    """Causes a rehearsed fault: "lose" kills the member, "hang" stops it, "give_back" starts it again or continues it.
    It returns by itself after `seconds`; None: as after any other loss."""
    with self._lock:
      worker = self._workers[member]
      if action == "lose":
        worker.absent_until = None if seconds is None else time.monotonic() + seconds
        self._signal(member, signal.SIGKILL)
      elif action == "hang":
        self._signal(member, signal.SIGSTOP)
        if seconds is not None:
          _after(seconds, self._signal, member, signal.SIGCONT)
      elif action == "give_back":
        self._signal(member, signal.SIGCONT)
        worker.absent_until = None
        if worker.is_down:
          _after(0.0, self._start, worker, worker.lives)

  def close(self, number: int, seconds: float) -> None:
    """Sends the signal to all processes, and SIGKILL to those that are left after `seconds`. Returns when all ended."""
    with self._lock:
      self._closing = True
      processes = [process for worker in self._workers.values() for process in worker.processes]
    for process in processes:
      if process.poll() is None:
        process.send_signal(number)
        process.send_signal(signal.SIGCONT)
    _wait_for(processes, seconds)


def _after(seconds: float, work: Callable[..., None], *arguments: object) -> None:
  """Calls work(*arguments) in a thread, after so many seconds."""
  timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), work, arguments)
  timer.daemon = True
  timer.start()


def _wait_for(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> int:
  """Returns when all have ended: sends SIGKILL to those that are left after `seconds`. Returns their number."""
  deadline, killed = time.monotonic() + seconds, []
  for process in processes:
    try:
      process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
      process.kill()
      killed.append(process)
  for process in killed:
    process.wait()
  return len(killed)
