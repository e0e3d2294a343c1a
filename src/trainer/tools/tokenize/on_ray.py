"""Writes parts as tasks of a Ray cluster. Their files come to this machine, so the nodes share only the input."""

from __future__ import annotations

import contextlib
import functools
import queue
import socket
import tempfile
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from input_pipeline import packages
from input_pipeline.documents import Piece
from input_pipeline.workers import WorkerLost
from trainer.config.errors import ConfigError
from trainer.tools.tokenize import part as part_lib
from trainer.tools.tokenize.output import Output, Part
from trainer.tools.tokenize.part import TokenizeJob
from trainer.tools.tokenize.run import WriteParts, Written

_CONNECT_SECONDS = 10.0  # for a connection
_INIT_SECONDS = 60.0  # for Ray's answer
_TRIES = 5  # of a task whose process or node is lost


@contextlib.contextmanager
def connected(address: str) -> Iterator[WriteParts]:
  """What writes parts on the cluster; no task is left at the end. Raises ConfigError if there is no such cluster."""
  ray = packages.load("ray", package="ray", extra="ray", reason="--ray")
  try:
    if address != "auto":
      _require_answer(address)
    _connect(ray, address)
  except (OSError, RuntimeError, ValueError) as error:
    raise ConfigError(
      f"--ray={address}: no Ray cluster answers there ({' '.join(str(error).split())[:300]}). "
      "Give auto or HOST:PORT on a node of the cluster, or ray://HOST:10001."
    ) from error
  try:
    yield functools.partial(_write_parts, ray)
  finally:
    ray.shutdown()


def _require_answer(address: str) -> None:
  """Raises OSError if nothing listens there: Ray would look for it for a minute. ValueError: no address."""
  place = urllib.parse.urlsplit(address if "://" in address else f"//{address}")
  if not place.hostname or not place.port:
    raise ValueError("it has no host and port")
  socket.create_connection((place.hostname, place.port), _CONNECT_SECONDS).close()


def _connect(ray: Any, address: str) -> None:
  """ray.init. Raises its error, or OSError after a limit: Ray waits for minutes for a server that is not Ray's."""
  ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

  def connect() -> None:
    try:
      ray.init(address=address, log_to_driver=False, logging_level="ERROR")
      ended.put(None)
    except (Exception, SystemExit) as error:  # noqa: BLE001 -- raised below, in the main thread
      ended.put(error)

  threading.Thread(target=connect, name="ray.init", daemon=True).start()
  try:
    error = ended.get(timeout=_INIT_SECONDS)
  except queue.Empty:
    raise OSError(f"no answer of Ray in {_INIT_SECONDS:g} s") from None
  if isinstance(error, SystemExit):
    raise OSError(f"Ray gave up with {error.code}") from error
  if error:
    raise error


def _write_parts(
  ray: Any, job: TokenizeJob, folder: Output, left: Sequence[Part], report: Callable[[int], None]
) -> Written:
  """Implements `WriteParts`."""
  task = ray.remote(_part).options(num_cpus=1, max_retries=_TRIES - 1)
  shared = ray.put(job)
  waiting = {task.remote(shared, part.split, part.pieces, folder.path(part).name): part for part in left}
  while waiting:
    (ready, *_), _ = ray.wait(list(waiting), num_returns=1)
    part = waiting.pop(ready)
    what = f"part {part.number} of {part.split}"
    try:
      counts, data = ray.get(ready)
    except ray.exceptions.RayTaskError as error:
      raise ConfigError(f"--ray: {what} fails on the cluster: {_last_line(error)}.") from error
    except ray.exceptions.RayError as error:
      raise WorkerLost(f"Ray lost the task of {what}, {_TRIES} times at most: {_last_line(error)}.") from error
    if isinstance(counts, ConfigError):
      raise counts
    folder.write(part, data)
    report(counts["tokens"])
    yield part, counts


def _last_line(error: Exception) -> str:
  return str(error).strip().rpartition("\n")[2].rstrip(".")


def _part(
  job: TokenizeJob, split: str, pieces: Sequence[Piece], name: str
) -> tuple[dict[str, Any] | ConfigError, bytes]:
  """A task: (counts, the file) of a part, or what is wrong with the input."""
  with tempfile.TemporaryDirectory() as temporary:
    path = Path(temporary) / name
    try:
      return part_lib.write_in_worker(job, split, pieces, path, lambda tokens: None), path.read_bytes()
    except ConfigError as error:
      return error, b""
