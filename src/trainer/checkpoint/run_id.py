"""The identity of a run: a random id in {run}/run_id, written when the run's folder is created.

Local copies on the hosts carry it, so that a run in a new folder of the same name does not continue from copies of an
earlier run. A save in storage checks it, so that a folder that was moved away in mid-run is noticed.
"""

from __future__ import annotations

import os
import secrets

from input_pipeline import places
from input_pipeline.places import Place
from trainer.checkpoint.errors import CheckpointError, Rejected
from trainer.checkpoint.together import on_primary
from trainer.config.errors import ConfigError
from trainer.observe import files
from trainer.world import World

FILE = "run_id"


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
