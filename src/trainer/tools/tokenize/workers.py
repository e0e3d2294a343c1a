"""Processes that write parts. They end with the process that started them, however it ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from trainer.config.errors import ConfigError
from trainer.tools.tokenize import part as part_lib
from trainer.tools.tokenize.output import Part
from trainer.tools.tokenize.part import Job

_END_SECONDS = 10


class WorkerLost(RuntimeError):
  """A process that wrote a part has ended by itself: it was killed, perhaps for memory."""


class Workers:
  """Processes that take parts one by one. Use it as a context manager: at its end the processes are killed."""

  def __init__(self, job: Job, processes: int) -> None:
    # Not forked: the reader of ArrayRecord and the tokenizer have threads.
    context = multiprocessing.get_context("spawn")
    self._connections: dict[connection.Connection, multiprocessing.process.BaseProcess] = {}
    for _ in range(processes):
      ours, theirs = context.Pipe()
      process = context.Process(target=_serve, args=(theirs, job), daemon=True)
      process.start()
      theirs.close()
      self._connections[ours] = process

  def run(
    self, parts: Sequence[tuple[Part, Path]], report: Callable[[int], None]
  ) -> Iterator[tuple[Part, dict[str, Any]]]:
    """Yields each part, in the order in which they end, with its counts. `parts`: with their output files.

    report: called with the number of tokens that have been added. Raises ConfigError if a part cannot be written,
    WorkerLost if a process has ended.
    """
    waiting = deque(parts)
    working: dict[connection.Connection, Part] = {}
    for idle in self._connections:
      self._give(idle, waiting, working)
    while working:
      for ready in connection.wait(list(working)):
        channel = next(one for one in working if one is ready)
        try:
          kind, value = channel.recv()
        except (EOFError, ConnectionError):
          raise self._lost(channel, working[channel]) from None
        if kind == "tokens":
          report(value)
        elif kind == "failed":
          raise ConfigError(value)
        else:
          done = working.pop(channel)
          self._give(channel, waiting, working)
          yield done, value

  def _give(
    self,
    channel: connection.Connection,
    waiting: deque[tuple[Part, Path]],
    working: dict[connection.Connection, Part],
  ) -> None:
    """Gives the process behind `channel` its next part, if there is one."""
    if waiting:
      part, path = waiting.popleft()
      working[channel] = part
      try:
        channel.send((part, path))
      except ConnectionError:
        raise self._lost(channel, part) from None

  def _lost(self, channel: connection.Connection, part: Part) -> WorkerLost:
    process = self._connections[channel]
    process.join(_END_SECONDS)
    return WorkerLost(
      f"A process ended with code {process.exitcode} while it wrote part {part.number} of {part.split} (-9: killed, "
      "perhaps for memory; use fewer --processes then)."
    )

  def __enter__(self) -> Self:
    return self

  def __exit__(
    self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
  ) -> None:
    for channel, process in self._connections.items():
      process.kill()  # a part that is not complete leaves only a hidden file, which the next start removes
      process.join(_END_SECONDS)
      channel.close()


def _serve(channel: connection.Connection, job: Job) -> None:
  """Body of a process: writes the parts that arrive, until it is killed or its parent has ended."""
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes, and the parent kills this one
  threading.Thread(target=_end_with_parent, daemon=True).start()
  os.putenv("TOKENIZERS_PARALLELISM", "false")  # this process is one of as many as the user wants cores used
  while True:
    part, path = channel.recv()
    try:
      counts = part_lib.write(job, part.split, part.pieces, path, lambda tokens: channel.send(("tokens", tokens)))
    except (ConfigError, OSError) as error:
      channel.send(("failed", str(error)))
    else:
      channel.send(("done", counts))


def _end_with_parent() -> None:
  parent = multiprocessing.parent_process()
  assert parent is not None
  parent.join()
  os._exit(1)
