"""What may happen to a process at any time: signals, and unexpected errors in its threads."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

from worlds.exit_codes import INTERRUPTED, PREEMPTED

REQUESTS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
# `timeout` and shells signal the process and then its whole group, and Python's handler runs later than the thread. All
# of that is one signal. A user who signals a second time waits longer.
SAME_SIGNAL_SECONDS = 1.0

Handler = Callable[[int, FrameType | None], None]


class Repeats:
  """Recognises a second signal of the same kind: it asks for an end at once."""

  def __init__(self) -> None:
    self._first: dict[int, float] = {}

  def __call__(self, number: int) -> bool:
    """Whether this signal is a second one."""
    now = time.monotonic()
    return now - self._first.setdefault(number, now) > SAME_SIGNAL_SECONDS


def requests() -> list[signal.Signals]:
  """The signals that ask this process to save and end. An ignored signal (as under nohup) does not."""
  return [signal.SIGTERM, *(n for n in REQUESTS[1:] if signal.getsignal(n) is not signal.SIG_IGN)]


def end_on_error(end: Callable[[], None]) -> None:
  """From now on, an unexpected exception in any thread of this process is printed, and calls `end` in that thread:
  otherwise the run would wait for ever for what the thread should have done."""

  def report(args: threading.ExceptHookArgs) -> None:
    name = args.thread.name if args.thread else "unknown"
    text = "".join(traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback))
    print(f"error: the thread {name!r} has failed, so the run ends with exit code 1.\n{text}", file=sys.stderr)
    end()

  threading.excepthook = report


def end_before_start(number: int, frame: FrameType | None) -> None:
  """Handler of a launcher that has started nothing yet."""
  with contextlib.suppress(OSError):
    os.write(2, f"{signal.Signals(number).name} before anything was started.\n".encode())
  os._exit(INTERRUPTED if number == signal.SIGINT else PREEMPTED)


@contextlib.contextmanager
def handled(signalled: Handler, failed: Callable[[], None]) -> Iterator[None]:
  """During the block, Ctrl-C and requests to end call `signalled`, and `end_on_error` calls `failed`. After it, a
  launcher ignores them: what it has started has ended, and its exit code is known."""
  hook = threading.excepthook
  handlers = {number: signal.signal(number, signalled) for number in (*requests(), signal.SIGINT)}
  end_on_error(failed)
  try:
    yield
  finally:
    threading.excepthook = hook
    for number, handler in handlers.items():
      signal.signal(number, signal.SIG_IGN if handler is end_before_start else handler)


def run_launcher(main: Callable[[], int]) -> NoReturn:
  """Runs the command of a launcher and ends the process with its exit code. Until `main` installs handlers of its own,
  Ctrl-C and requests to end end the process at once: it has started nothing yet."""
  for number in (*requests(), signal.SIGINT):
    signal.signal(number, end_before_start)
  code = main()
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)  # its threads are of no use any more, and the interpreter's end takes seconds on a busy machine
