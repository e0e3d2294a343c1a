"""One launch per run: the processes of a second one would overwrite the checkpoints of the first."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from input_pipeline import storage
from input_pipeline.locks import locked
from trainer.config.errors import ConfigError

FILE = "launch_id"  # {run}/launch_id: the launch whose processes hold the lock of the run's folder, or held it last
_POLL_SECONDS = 0.1


@contextlib.contextmanager
def held(
  directory: str, launch: str, timeout: float, log: Callable[[str], None], *, joins: bool = False
) -> Iterator[Callable[[], bool]]:
  """Holds the lock of the run's folder, together with other processes of the same launch. Creates the folder.

  Yields a function: whether the folder is still at this path, and no other launch has the folder that is there now.

  launch: the id of the launch; all ids have the same length. joins: other processes of the launch have the folder
  already. If it is not there, or another launch has it, raises ConfigError and writes nothing. Every process that may
  ever write the run's files holds the lock, so that no other launch begins when one of these processes takes over from
  another. The system frees the lock when the process ends in any way. Waits up to `timeout` seconds for processes of
  other launches, then raises ConfigError. Object stores and file systems without flock have no lock: there a run must
  be launched only once.
  """
  if storage.is_address(directory):
    yield lambda: True
    return
  path = Path(directory, FILE)
  is_ours: Callable[[], bool] = lambda: os.path.isdir(directory) and _launch_at(path) in (launch, "")
  if joins and not is_ours():
    raise ConfigError(f"{directory} was moved, deleted or replaced during the run. Move the folder back")
  os.makedirs(directory, exist_ok=True)
  descriptor = os.open(directory, os.O_RDONLY)
  try:
    deadline = time.monotonic() + timeout
    announced = False
    while (entered := _entered(descriptor, path, launch)) is False:
      if time.monotonic() > deadline:
        raise ConfigError(
          f"another process is training in {directory} and has not ended within {timeout:g} s: two would overwrite "
          "each other's checkpoints. End it, or choose another run_name"
        )
      if not announced:
        log(f"Another process is training in {directory}; waiting up to {timeout:g} s for it to end.")
        announced = True
      time.sleep(_POLL_SECONDS)
    if entered is None:
      log(
        f"warning: cannot check whether another process trains in {directory}: its file system has no locks (flock). "
        "Make sure that no other one does."
      )
    yield is_ours
  finally:
    os.close(descriptor)


def _entered(descriptor: int, path: Path, launch: str) -> bool | None:
  """Whether this process holds the lock now; None: the file system has no locks."""
  import fcntl

  alone = locked(descriptor, shared=False)
  if alone is None:
    return None
  if alone:
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
      os.pwrite(file, launch.encode(), 0)  # in place: this needs no space on a full disk
    finally:
      os.close(file)
  # LOCK_EX becomes LOCK_SH in two steps. Another launch may get the lock between them, and then writes its own id.
  if locked(descriptor, shared=True) and _launch_at(path) == launch:
    return True
  fcntl.flock(descriptor, fcntl.LOCK_UN)
  return False


def _launch_at(path: Path) -> str:
  """The launch in the file; "" if there is no such file."""
  try:
    return path.read_text(errors="replace")
  except FileNotFoundError:
    return ""
