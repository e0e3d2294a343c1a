"""Processes that prepare data, so that the threads and the memory of this work end with it.

The reader of ArrayRecord starts 64 threads, and the tokenizers library one per core. In the process that trains, they
would stay for the whole run.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing import connection
from typing import Any, Protocol, Self, TypeVar

X = TypeVar("X")
Y = TypeVar("Y")
# A process costs 0.4 CPU seconds to start, which is more than the preparation of a few small sources.
_SMALL = 16_000_000
_LEAST = _SMALL // 16
_END_SECONDS = 10
_CHILD = "import sys; from input_pipeline import workers; workers.serve(int(sys.argv[1]))"


class Call(Protocol):
  """How a function is called that prepares data: `here`, or in another process."""

  def __call__(self, function: Callable[..., X], what: str, report: Callable[[Any], None] | None = None) -> X:
    """The result of `function`, which can be pickled: a function of a module, or a partial of one.

    what: the work, for an error: "it reads A". report: gets the values that `function` gives to its only argument;
    without `report` the function has no argument. Raises what `function` raises, and WorkerLost.
    """
    ...


class WorkerLost(RuntimeError):
  """A process has ended before its work: it was killed, perhaps for memory."""


def here(function: Callable[..., X], what: str, report: Callable[[Any], None] | None = None) -> X:
  """Implements `Call` without another process."""
  return function(report) if report else function()


def prepare_each(prepare: Callable[[X, Call], Y], sources: Sequence[X], sizes: Sequence[int]) -> list[Y]:
  """[prepare(source, call) for each source]. If they are many or large, `call` has processes, and several run at once.

  sizes: bytes of each source. Raises the first error; the work on other sources is then stopped.
  """
  if sum(max(size, _LEAST) for size in sizes) < _SMALL:
    return [prepare(source, here) for source in sources]
  with Workers(min(cores(), len(sources))) as workers:
    done = dict(workers.each(lambda number: prepare(sources[number], workers.call), range(len(sources))))
  return [done[number] for number in range(len(sources))]


def cores() -> int:
  """The cores that this process may use."""
  return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Workers:
  """Processes that start when they are needed. A context manager: at its end they are killed.

  They also end with the process that started them, however it ends.
  """

  def __init__(self, most: int) -> None:
    """most: functions of `each` that run at once, and so processes."""
    self._threads = ThreadPoolExecutor(most)
    self._lock = threading.Lock()
    self._all: list[_Process] = []
    self._idle: list[_Process] = []
    self._closed = False

  def each(self, function: Callable[[X], Y], items: Sequence[X]) -> Iterator[tuple[X, Y]]:
    """Yields (item, function(item)) in the order in which they end. `function` runs in a thread."""
    futures = {self._threads.submit(function, item): item for item in items}
    for future in as_completed(futures):
      yield futures[future], future.result()

  def call(self, function: Callable[..., X], what: str, report: Callable[[Any], None] | None = None) -> X:
    """Implements `Call`. Thread safe."""
    with self._lock:
      if self._closed:
        raise WorkerLost(f"The processes have been stopped before {what}.")
      if not self._idle:
        self._idle.append(_Process())
        self._all.append(self._idle[-1])
      worker = self._idle.pop()
    try:
      return worker.call(function, what, report)
    finally:
      if not worker.busy:
        with self._lock:
          self._idle.append(worker)

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *error: object) -> None:
    with self._lock:
      self._closed = True
    for worker in self._all:
      worker.end()  # the threads that wait for it then end too
    self._threads.shutdown(cancel_futures=True)


class _Process:
  """One process. `busy` stays true if it was lost, or its caller was interrupted."""

  def __init__(self) -> None:
    self._channel, theirs = connection.Pipe()
    # Its end of the pipe of stdin closes when this process ends. In a group of its own, Ctrl-C does not reach it.
    self._process = subprocess.Popen(
      [sys.executable, "-c", _CHILD, str(theirs.fileno())],
      stdin=subprocess.PIPE,
      pass_fds=[theirs.fileno()],
      process_group=0,
    )
    theirs.close()
    self.busy = False

  def call(self, function: Callable[..., Any], what: str, report: Callable[[Any], None] | None) -> Any:
    self.busy = True
    try:
      self._channel.send((function, report is not None))
      while True:
        kind, value = self._channel.recv()
        if kind != "report":
          break
        assert report is not None
        report(value)
    except (EOFError, ConnectionError):
      code = self._process.wait(_END_SECONDS)
      raise WorkerLost(f"A process ended with code {code} while {what} (-9: killed, perhaps for memory).") from None
    self.busy = False
    if kind == "failed":
      raise value
    return value

  def end(self) -> None:
    """Kills the process. What it has not finished is of no use."""
    self._process.kill()
    self._process.wait(_END_SECONDS)
    assert self._process.stdin is not None
    self._process.stdin.close()


def serve(descriptor: int) -> None:
  """Body of a process: calls the functions that arrive, until it is killed or the process that started it has ended."""
  threading.Thread(target=_end_with_parent, daemon=True).start()
  for stream in (sys.stdout, sys.stderr):
    if isinstance(stream, io.TextIOWrapper):  # None if it is closed
      stream.reconfigure(errors="backslashreplace")  # the name of a file may have what the encoding lacks
  channel = connection.Connection(descriptor)
  while True:
    function, reports = channel.recv()
    try:
      reply = "done", function(lambda value: channel.send(("report", value))) if reports else function()
    except Exception as error:  # noqa: BLE001 -- the caller raises it
      error.add_note(traceback.format_exc())
      reply = "failed", error
    with contextlib.suppress(OSError):  # a lost terminal
      print(end="", flush=True)
    channel.send(reply)


def _end_with_parent() -> None:
  """Ends this process when the pipe from the process that started it is closed."""
  sys.stdin.buffer.read()
  os._exit(1)
