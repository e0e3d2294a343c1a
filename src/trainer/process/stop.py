"""Why and when the process must stop: its signals, and what the processes of a run agree on.

`Stop` lives from the first line of the command until the process has ended with its exit code. SIGTERM, SIGUSR1 (the
warning of Slurm and other schedulers) and SIGHUP (a lost terminal; ignored under nohup) are requests to save and end. A
request to one process is one to all, and all agree on a step. SIGINT is Ctrl-C.

| phase | request | SIGINT |
|---|---|---|
| starting: this process has done no step | nothing to save: exit at once with 42 | exit at once with 130 |
| running | the loop saves and ends with 42 | KeyboardInterrupt in the main thread |
| ending: all is saved and the exit code is known | the process ends with that code | exit at once with that code |

SIGUSR2 prints the stack of every thread on stderr, in any phase, also while the main thread hangs outside of Python.

A second signal of the same kind, more than a second after the first, ends the process at once: while running with 128
plus its number, as shells report it, while ending with the exit code that is known.
"""

from __future__ import annotations

import contextlib
import enum
import faulthandler
import os
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from types import FrameType

from worlds.exit_codes import INTERRUPTED, PREEMPTED
from worlds.interruptions import REQUESTS, SAME_SIGNAL_SECONDS, Handler, requests

_RECORD_SECONDS = 2.0  # that `on_exit` may take


class StopRequested(Exception):
  """Work between two steps was broken off, because the process must end."""


class _Phase(enum.Enum):
  STARTING = enum.auto()
  RUNNING = enum.auto()
  ENDING = enum.auto()


class Stop:
  """Owns the handlers of the process, and answers after each step whether to save and end. Made once, in the main
  thread, before anything slow is imported.

  Python runs a handler only between two bytecodes of the main thread, which may be in an import, a compilation or a
  hung collective for minutes. A thread therefore reads each signal from a pipe that Python's C handler writes at once.
  """

  def __init__(self) -> None:
    self.on_exit: Callable[[int], None] = lambda code: None  # records an exit while starting; gets the exit code
    self._phase = _Phase.STARTING
    self._code = 0  # of the phase ENDING
    self.request = ""  # name of the first signal that asked this process to save and end
    self._interrupted = False
    self._times: defaultdict[tuple[str, int], list[float]] = defaultdict(list)  # of signals, by who saw them and number
    self._forward: Callable[[int], None] | None = None
    self._leaving = threading.Lock()
    self._before: tuple[Mapping[int, object], int] | None = None  # handlers and wakeup descriptor
    self._pipe = -1  # its end for Python's C handler
    # None: no run is open, or it does not save at a request.
    self._processes_agree: Callable[[bool, int], bool] | None = None
    self._asked = 0  # how often all processes have asked
    self._agreed = False
    self._announced = False

  def join_run(
    self,
    agreed: Callable[[bool, int], bool],
    *,
    saves: bool,
    several: bool = False,
    log: Callable[[str], None] = lambda line: None,
    emit: Callable[..., object] = lambda kind, **fields: None,
    asked: Callable[[], bool] = lambda: False,
    on_exit: Callable[[int], None] = lambda code: None,
  ) -> None:
    """A run is open. Call it once, after jax.distributed has started.

    agreed: see `World.stop_agreed`. saves: whether the run saves and ends at a request; if not, a request ends the
    process at once, as the system does. several: whether jax.distributed has joined this process with others. asked:
    whether another process was asked to end the whole run. log takes a line, emit a kind and fields for events.jsonl.
    on_exit: records an exit before the first step; gets the exit code.
    """
    self.on_exit = on_exit
    if not saves:
      if self._before is not None:
        for number in requests():
          signal.signal(number, signal.SIG_DFL)
      return
    self._processes_agree, self._asked_elsewhere = agreed, asked
    self._log, self._emit = log, emit
    self._reclaim(forward=several)
    if several:  # exiting alone would leave the others waiting for this process
      self.running()

  @property
  def noticed(self) -> bool:
    """Whether this process knows that it must save and end. Other processes may not know yet."""
    return bool(self.request) or self._agreed or (self._processes_agree is not None and self._asked_elsewhere())

  def requested(self, step: int) -> bool:
    """Whether to save and end with the state after `step` completed steps; once true, always true.

    Every process must call it equally often, and at least once in a step: the answers are the same on all of them.
    """
    self._asked += 1
    if self._agreed or self._processes_agree is None:
      return self._agreed
    self._agreed = self._processes_agree(bool(self.request), self._asked)
    if (self.request or self._agreed) and not self._announced:
      # Not in the handler, which may have interrupted a print.
      self._announced = True
      request = self.request or "SIGTERM"  # received by another process
      self._emit("preemption", step=step, signal=request)
      self._log(f"{request} received: finishing the step, saving a checkpoint and exiting.")
    return self._agreed

  def listen(self) -> None:
    """Installs the handlers. Leaves SIGINT alone if it is ignored, as for a command in a shell's background."""
    handlers: dict[int, Handler] = dict.fromkeys(requests(), self._handle)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
      handlers[signal.SIGINT] = self._handle
    read_end, self._pipe = os.pipe()
    os.set_blocking(self._pipe, False)
    threading.Thread(target=self._read, args=(read_end,), name="signals", daemon=True).start()
    descriptor = signal.set_wakeup_fd(self._pipe, warn_on_full_buffer=False)
    self._before = {number: signal.signal(number, handler) for number, handler in handlers.items()}, descriptor
    if sys.__stderr__ is not None:  # None: the process was started with stderr closed
      faulthandler.register(signal.SIGUSR2, file=sys.__stderr__, all_threads=True)

  def _reclaim(self, *, forward: bool) -> None:
    """Installs the SIGTERM handler again, after the start of a runtime that has replaced it by one in C. forward: also
    call that one when the signal comes: JAX's preemption service tells the other processes."""
    if self._before is None:
      return
    import ctypes  # here and not above: the handlers must be installed as early as possible

    address = _handler_address(signal.SIGTERM)
    signal.signal(signal.SIGTERM, self._handle)
    if forward and address not in (signal.SIG_DFL, signal.SIG_IGN, _handler_address(signal.SIGTERM)):
      self._forward = ctypes.CFUNCTYPE(None, ctypes.c_int)(address)

  def running(self) -> None:
    """From now on there may be something to save."""
    self._phase = _Phase.RUNNING

  def ending(self, code: int) -> None:
    """From now on the process ends with `code`, whatever signal comes."""
    self._phase, self._code = _Phase.ENDING, code

  def ignore(self) -> None:
    """Ignores these signals, also while the interpreter shuts down, which would put the system's defaults back."""
    for number in (*REQUESTS, signal.SIGINT):
      signal.signal(number, signal.SIG_IGN)

  def restore(self) -> None:
    """Puts back the handlers from before `listen`, in a process that outlives the run."""
    if self._before is None:
      return
    (handlers, descriptor), self._before = self._before, None
    faulthandler.unregister(signal.SIGUSR2)
    signal.set_wakeup_fd(descriptor)
    for number, handler in handlers.items():
      signal.signal(number, signal.SIG_DFL if handler is None else handler)  # type: ignore[arg-type]
    os.close(self._pipe)  # ends the thread, which closes the other end

  def _read(self, descriptor: int) -> None:
    while number := os.read(descriptor, 1):
      self._received("thread", number[0])
    os.close(descriptor)

  def _handle(self, number: int, frame: FrameType | None) -> None:
    """Python's handler. Sees requests too, for when a library has replaced the wakeup descriptor."""
    self._received("handler", number)
    if number == signal.SIGINT and self._phase is _Phase.RUNNING and not self._interrupted:
      self._interrupted = True  # once: the cleanup after it must not be interrupted by a repetition
      raise KeyboardInterrupt

  def _received(self, seen_by: str, number: int) -> None:
    if number not in (*REQUESTS, signal.SIGINT):
      return
    now = time.monotonic()
    times = self._times[seen_by, number]
    times.append(now)
    again = now - times[0] > SAME_SIGNAL_SECONDS
    # On a busy machine, the handler may have interrupted the run before the thread sees the same signal.
    late = seen_by == "thread" and len(times) <= len(self._times["handler", number])
    name = signal.Signals(number).name
    if self._phase is _Phase.STARTING and number != signal.SIGINT:
      text = f"{name} before the first step of this process: nothing to save. Exit code {PREEMPTED}."
      self._exit(PREEMPTED, text, self.on_exit)
    elif self._phase is _Phase.STARTING:
      self._exit(INTERRUPTED, "Interrupted.", self.on_exit)
    elif self._phase is _Phase.ENDING:
      if again or (number == signal.SIGINT and not late):
        self._exit(self._code, f"{name} while ending: exiting at once with code {self._code}")
    elif again:
      self._exit(128 + number, f"second {name}: exiting at once")
    elif number != signal.SIGINT and not self.request:
      self.request = name
      if self._forward is not None:
        self._forward(signal.SIGTERM)

  def _exit(self, code: int, text: str, record: Callable[[int], None] | None = None) -> None:
    """Ends the process, once. `record` runs in a thread: this thread may have interrupted another that holds a lock."""
    if not self._leaving.acquire(blocking=False):
      return
    if record is not None:
      recorder = threading.Thread(target=record, args=(code,), name="record of the exit", daemon=True)
      recorder.start()
      recorder.join(_RECORD_SECONDS)
    with contextlib.suppress(OSError):
      os.write(2, f"{text}\n".encode())
    os._exit(code)


def _handler_address(number: int) -> int:
  """The address of the C function that handles the signal now; 0: the system's default, 1: it is ignored."""
  import ctypes

  library = ctypes.CDLL(None, use_errno=True)
  action = ctypes.create_string_buffer(512)  # struct sigaction; its first member is the handler
  if library.sigaction(number, None, action) != 0:
    raise OSError(ctypes.get_errno(), "sigaction")
  return ctypes.c_void_p.from_buffer(action).value or 0
