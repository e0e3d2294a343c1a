"""The folder of a run: its id, and the lock of the launch that may write there.

{run}/run_id has a random id, written when the folder is created. Local copies on the hosts carry it, so that a run in a
new folder of the same name does not continue from copies of an earlier run. A save in storage checks it, so that a
folder that was moved away during the run is noticed. {run}/launch_id names the launch whose processes hold the lock of
the folder, or held it last: the processes of a second launch would overwrite the checkpoints of the first.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from input_pipeline import places, storage
from input_pipeline.locks import locked
from input_pipeline.places import Place
from trainer.checkpoint.checkpoint_errors import CheckpointError, Rejected
from trainer.checkpoint.together import on_primary
from trainer.config.errors import ConfigError
from trainer.observe import files
from trainer.world import World

if TYPE_CHECKING:  # tools that need no JAX import this module
  from trainer.cluster import Cluster
  from trainer.config.schema import Config

FILE = "run_id"
LAUNCH_FILE = "launch_id"
_POLL_SECONDS = 0.1


class RunFolder:
  """The folder of a run that this process has open."""

  def __init__(self, directory: str, run_id: str, is_ours: Callable[[], bool]) -> None:
    """run_id: "" without checkpoints. is_ours: of `held`."""
    self.directory, self.run_id, self._is_ours = directory, run_id, is_ours

  def require(self, what: str) -> None:
    """Raises CheckpointError, which begins with `what`, if the folder was moved or is another run's now."""
    if self.run_id:
      require(self.directory, self.run_id, what)
    if not self._is_ours():
      raise CheckpointError(f"{what}: {self.directory} was moved or deleted, or another launch uses it now")


@contextlib.contextmanager
def opened(config: Config, cluster: Cluster, log: Callable[[str], None]) -> Iterator[RunFolder]:
  """The folder of the run, which is created if the run is new. A process that writes its files now, or may one day,
  holds the lock of the folder. Raises as `held` and `establish`."""
  directory, grace = config.run_directory, config.checkpoint.autocheckpoint_grace_seconds
  with contextlib.ExitStack() as stack:
    is_ours: Callable[[], bool] = lambda: True
    if cluster.is_primary or not cluster.recovers_in_process:
      launch = cluster.launch_id or secrets.token_hex(6)
      # A launch that is stopping may need the time of grace.
      is_ours = stack.enter_context(held(directory, launch, grace, log, joins=cluster.joins))
    has_id = config.checkpoint.enable_checkpointing
    run_id = establish(directory, cluster.world, cluster.launch_id) if has_id else ""
    yield RunFolder(directory, run_id, is_ours)


def folder(run_directory: str) -> Place:
  """The run's folder. Raises ConfigError if there can be no such folder."""
  files.check_address(run_directory)
  return places.at(run_directory)


def split(place: str) -> tuple[str, str]:
  """(folder, step or "") of RUN_DIR or RUN_DIR@STEP. A folder may have @ in its name: one that exists is meant.

  Raises ConfigError for another word after a run's folder.
  """
  place = os.path.expanduser(place)
  files.check_address(place)
  directory, at, step = place.rpartition("@")
  if not at or files.exists(place):
    return place, ""
  if step.isascii() and step.isdecimal():
    return directory, step
  if files.exists(directory):
    raise ConfigError(f"{place}: {step!r} is not the number of a step.\nWrite {directory}@STEP, or {directory} alone.")
  return place, ""


def establish(run_directory: str, world: World, fresh: str = "") -> str:
  """The id of the run on every process. The primary creates folder and id on the first start.

  fresh: the id of a new run, where several worlds start it at the same time; "": a random one. Raises ConfigError if
  something else has the name of the id, and CheckpointError if storage fails.
  """

  def find() -> str:
    try:
      return read(run_directory) or _create(folder(run_directory), fresh or secrets.token_hex(6))
    except Rejected as error:
      raise ConfigError(
        f"{run_directory}/{error}. Delete it if it is no file of a run; local copies are then not used"
      ) from error

  return on_primary(world, find)


def read(run_directory: str) -> str:
  """The id in the run's folder; "" if there is none. Raises Rejected if it is no file, and StorageError."""
  path = folder(run_directory) / FILE
  if not path.exists():
    return ""
  if not path.is_remote and not os.path.isfile(path):  # reading a pipe would wait for ever
    raise Rejected(f"{FILE} is no regular file")
  return path.read_bytes().decode(errors="replace").strip()


def require(run_directory: str, expected: str, what: str) -> None:
  """Raises CheckpointError, which begins with `what`, if the id in the run's folder is not `expected`, and StorageError
  if it cannot be read: that says nothing about the folder."""
  try:
    found = read(run_directory)
  except Rejected as reason:
    found = str(reason)
  if found != expected:
    raise CheckpointError(
      f"{what}: {run_directory} was moved, deleted or replaced during the run (its {FILE} says {found!r}, at the start "
      f"it was {expected!r}). Move the folder back and start again"
    )


def _create(path: Place, made: str) -> str:
  path.mkdir(parents=True, exist_ok=True)
  (path / FILE).write_text(made + "\n")
  return made


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
  path = Path(directory, LAUNCH_FILE)
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
