"""SIGTERM: the first asks for a checkpoint and an orderly end, the second ends the process at once.

SIGINT (Ctrl-C): the first is a KeyboardInterrupt, the second ends the process at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from types import FrameType, TracebackType
from typing import NoReturn, Self

import jax

from trainer.config.schema import CheckpointSection

# `timeout` and shells signal the process and then its whole group; Python's handler comes after the C one. All that is
# one notice. Whoever means it a second time waits longer.
SAME_SIGNAL_SECONDS = 1.0
AT_ONCE = 128  # plus the number is the exit code of a second signal: what a shell reports of one that ended a process


class Preemption:
  """Listens for SIGTERM and SIGINT inside `with`. One per process, entered in the main thread after jax.distributed.

  With several processes a signal to one is a notice to all, and all agree on the step: JAX's preemption service does
  that, but it listens by a signal handler of its own, which ours replaces and calls.
  """

  def __init__(
    self,
    cfg: CheckpointSection,
    log: Callable[[str], None] = lambda line: None,
    emit: Callable[..., object] = lambda kind, **fields: None,
  ) -> None:
    """log takes a line, emit a kind and fields for events.jsonl.

    With enable_autocheckpoint or enable_checkpointing off SIGTERM ends the process as usual.
    """
    self._enabled = cfg.enable_autocheckpoint and cfg.enable_checkpointing
    self._log, self._emit = log, emit
    self._noticed = False  # a signal, here or elsewhere
    self._first: dict[str, float] = {}  # time.monotonic() of the first signal to this process, by who saw it
    self._agreed = False
    self._told = False
    self._forward: Callable[[int], None] | None = None
    self._pipe: tuple[int, int] | None = None
    self._before: tuple[Mapping[int, object], int] | None = None
    self._interrupted: float | None = None  # time.monotonic() of the first SIGINT
    self._raised = False

  def __enter__(self) -> Self:
    handlers: dict[int, Callable[[int, FrameType | None], None]] = {}
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not ignored, as in a shell's background
      handlers[signal.SIGINT] = self._interrupt
    if self._enabled:
      handlers[signal.SIGTERM] = self._handle
    if self._enabled and jax.process_count() > 1:
      self._forward = _native_handler(signal.SIGTERM)
    self._pipe = os.pipe()
    os.set_blocking(self._pipe[1], False)
    # Python runs a handler only between two bytecodes of the main thread, which may sit in a compilation or a hung
    # collective for minutes. The wakeup descriptor is written in the C handler, at once, and a thread reads it.
    threading.Thread(target=self._listen, args=(self._pipe[0],), name="preemption", daemon=True).start()
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    self._before = before, signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
    return self

  def __exit__(
    self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
  ) -> None:
    """Gives the signals back. (JAX's own handler, which Python cannot reinstall, becomes the default.)"""
    if self._pipe is None or self._before is None:
      return
    before, descriptor = self._before
    signal.set_wakeup_fd(descriptor)
    for number, handler in before.items():
      signal.signal(number, signal.SIG_DFL if handler is None else handler)  # type: ignore[arg-type]
    os.close(self._pipe[1])  # ends the thread, which closes the other end
    self._pipe = self._before = None

  def requested(self, step: int) -> bool:
    """Whether to save and end after `step` completed steps; once true, always true.

    Every process must call it at every step, with the same steps: the answer is the same on all of them.
    """
    if self._agreed or not self._enabled:
      return self._agreed
    if jax.process_count() == 1:
      self._agreed = self._noticed
    else:
      from jax.experimental import multihost_utils

      self._agreed = bool(multihost_utils.reached_preemption_sync_point(step))
    self._noticed = self._noticed or self._agreed
    if self._noticed and not self._told:  # not in the handler, which may have interrupted a print
      self._told = True
      self._emit("preemption", step=step, signal="SIGTERM")
      self._log("SIGTERM received: finishing the step, saving a checkpoint and exiting.")
    return self._agreed

  @property
  def noticed(self) -> bool:
    """Whether this process has had its signal, or agreed to end; the others may not know yet."""
    return self._noticed

  def _signal(self, seen_by: str) -> None:
    """One signal as the thread or as the handler sees it: each counts for itself, the handler perhaps much later."""
    now = time.monotonic()
    first = self._first.setdefault(seen_by, now)
    if now - first > SAME_SIGNAL_SECONDS:
      _exit_at_once(signal.SIGTERM)
    if len(self._first) == 1 and first == now:
      self._noticed = True
      if self._forward is not None:
        self._forward(signal.SIGTERM)

  def _listen(self, descriptor: int) -> None:
    while number := os.read(descriptor, 1):
      if number[0] == signal.SIGTERM:
        self._signal("thread")
      elif number[0] == signal.SIGINT:
        now = time.monotonic()
        self._interrupted = self._interrupted or now
        if now - self._interrupted > SAME_SIGNAL_SECONDS:
          _exit_at_once(signal.SIGINT)
    os.close(descriptor)

  def _handle(self, number: int, frame: FrameType | None) -> None:
    """For when somebody else (an event loop) has taken the wakeup descriptor over."""
    self._signal("handler")

  def _interrupt(self, number: int, frame: FrameType | None) -> None:
    """Once: what follows upon the first one must not be interrupted by its repetitions."""
    if not self._raised:
      self._raised = True
      raise KeyboardInterrupt


def _exit_at_once(number: signal.Signals) -> NoReturn:
  with contextlib.suppress(OSError):
    os.write(2, f"second {number.name}: exiting at once\n".encode())
  os._exit(AT_ONCE + number)


def _native_handler(number: int) -> Callable[[int], None] | None:
  """The C function that handles the signal now, if it is neither the default, nor ignored, nor Python's."""
  if not isinstance(signal.getsignal(number), signal.Handlers):
    return None  # Python's (or none); of handlers set from C it does not know and says SIG_DFL
  library = ctypes.CDLL(None, use_errno=True)
  action = ctypes.create_string_buffer(512)  # struct sigaction; its first member is the handler
  if library.sigaction(number, None, action) != 0:
    raise OSError(ctypes.get_errno(), "sigaction")
  address = ctypes.c_void_p.from_buffer(action).value
  return ctypes.CFUNCTYPE(None, ctypes.c_int)(address) if address else None
