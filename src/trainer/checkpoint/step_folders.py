"""The folders of a run's steps in storage: which are committed, damaged, half deleted, or not ours."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from trainer import world as world_lib
from trainer.checkpoint import checksums
from trainer.checkpoint import run_id as run_id_lib
from trainer.checkpoint.backup import Log
from trainer.checkpoint.errors import CheckpointError, Rejected
from trainer.checkpoint.meta import check_meta
from trainer.observe import environment
from trainer.world import World

STEP = re.compile("0|[1-9][0-9]{0,17}")  # the name of a step's folder; not 0050, nor digits of other scripts
UNFINISHED = ".orbax-checkpoint-tmp"
COMMIT = "commit_success.txt"
# Orbax's text, with the path at the time of the commit (a run's folder may have moved since).
COMMIT_TEXT = rf"Checkpoint commit was successful to .*/[0-9]+({re.escape(UNFINISHED)})?"
META = "meta.json"
MANIFEST = "manifest.json"
DELETED = "DELETED"
# Orbax changes these files after the manifest is written. A restore does not read the first, and the text of the second
# is checked.
_UNSEALED = frozenset({"_CHECKPOINT_METADATA", COMMIT, MANIFEST})
# An object store checks a checksum of every object itself, and reading all files twice would double the time of a
# restore. There larger files have no CRC in the manifest, only their size; array data has its fingerprints.
_OBJECT_STORE_CRC_LIMIT = 1 << 20


def seal(folder: Any, meta: Mapping[str, Any]) -> None:
  """Writes the meta, with the versions of the libraries, and the manifest of all files. folder: an epath, of a step."""
  (folder / META).write_bytes(checksums.dump({**meta, "versions": environment.versions()}))
  limit = _OBJECT_STORE_CRC_LIMIT if "://" in str(folder) else None
  (folder / MANIFEST).write_bytes(checksums.dump(checksums.manifest(folder, _UNSEALED, limit)))


class StepFolders:
  """Lists, verifies, deletes and moves {directory}/{step}."""

  def __init__(self, directory: str, world: World, log: Log) -> None:
    self.directory = run_id_lib.folder(directory)
    self._world, self._log = world, log
    self._unusable: set[str] = set()  # rejected folders that could not be moved away: a save may overwrite them

  def _on_primary(self, call: Callable[[], Any]) -> Any:
    """The JSON value of call() on the primary, on every process. Every process raises CheckpointError if it failed."""
    value, failed = None, ""
    if self._world.is_primary:
      try:
        value = call()
      except CheckpointError as error:
        failed = str(error)
      except OSError as error:
        failed = f"{self.directory} cannot be read: {error}"
    value, failed = world_lib.from_primary(self._world, [value, failed])
    if failed:
      raise CheckpointError(failed)
    return value

  def _folders(self) -> list[Any]:
    try:
      return list(self.directory.iterdir())
    except FileNotFoundError:  # not made yet, or moved away by the user
      return []
    except OSError as error:
      raise CheckpointError(
        f"{self.directory} cannot be listed: {error}. Check that it is a readable folder"
      ) from error

  def _committed(self, name: str) -> bool:
    path = self.directory / name
    return bool(STEP.fullmatch(name)) and (path / COMMIT).exists() and not (path / DELETED).exists()

  def steps(self) -> list[int]:
    """Committed steps, oldest first. They may be damaged: see `verify`."""
    return sorted(int(path.name) for path in self._folders() if self._committed(path.name))

  def newest(self) -> tuple[int, float] | None:
    """(the newest committed step, when it was committed, in seconds since 1970; 0.0: unknown); None: there is none.

    Every process must call. Every process raises CheckpointError if the storage fails."""

    def find() -> list[tuple[int, float]]:
      at, steps = 0.0, self.steps()[-1:]
      for step in steps:
        with contextlib.suppress(OSError):
          at = float((self.directory / str(step) / COMMIT).stat().mtime)
      return [(step, at) for step in steps]

    found = self._on_primary(find)
    return (found[0][0], found[0][1]) if found else None

  def unfinished(self) -> dict[str, bool]:
    """{folder name: whether it is sealed and has its final name} of steps that are not committed.

    Every process must call. A folder with a temporary name was never committed: its save was killed before the rename.
    Removes folders that retention has half deleted.
    """
    return self._on_primary(self._unfinished)

  def _unfinished(self) -> dict[str, bool]:
    found = {}
    for path in self._folders():
      step, temporary, _ = path.name.partition(UNFINISHED)
      if (path / DELETED).exists():
        try:
          path.rmtree()
        except OSError as error:
          self._log(f"{path}, half deleted by retention, cannot be removed: {error}. Delete it.")
      elif STEP.fullmatch(step) and not self._committed(path.name):
        found[path.name] = not temporary and (path / MANIFEST).exists()
    return found

  def verify(self, step: int, part: int = 0, parts: int = 1) -> dict[str, Any]:
    """The meta of a committed step. Raises Rejected if a file is missing or damaged.

    With parts > 1 only every parts-th file is read, beginning with `part`: several processes share the work.
    """
    root = self.directory / str(step)
    commit, manifest, described = (checksums.read(root / name) for name in (COMMIT, MANIFEST, META))
    if not re.fullmatch(COMMIT_TEXT, commit.decode(errors="replace")):
      raise Rejected(f"{COMMIT} is damaged")
    entries = checksums.parse(manifest, MANIFEST)
    checksums.check(root, dict(list(entries.items())[part::parts]))
    meta = checksums.parse(described, META)
    check_meta(meta)
    if meta["step"] != step:
      raise Rejected(f"it is of step {meta['step']}")
    return meta

  def _loss(self, step: int) -> float | None:
    """The evaluation loss of a step; None if it has none or its meta is damaged."""
    try:
      loss = checksums.parse(checksums.read(self.directory / str(step) / META), META).get("metric")
    except Rejected as reason:
      self._log(f"Checkpoint {self.directory / str(step)} counts as one without an evaluation loss: {reason}.")
      return None
    return loss if isinstance(loss, int | float) else None

  def _delete(self, name: str) -> None:
    """Marks, uncommits, then removes: killed anywhere in between, the rest is never taken for a checkpoint."""
    path = self.directory / name
    if not path.exists():  # another process or the user was faster
      return
    (path / DELETED).write_text("being deleted by retention\n")
    (path / COMMIT).unlink(missing_ok=True)
    path.rmtree()

  def set_aside(self, rejected: Mapping[str, str]) -> None:
    """Moves folders, {name: reason}, to {run}/checkpoints_rejected, each with its reason in a file alongside."""
    moved = self._on_primary(lambda: [self._set_aside(name, reason) for name, reason in rejected.items()])
    for where, reason in zip(moved, rejected.values(), strict=True):
      self._log(f"{where}: {reason}")

  def _set_aside(self, name: str, reason: str) -> str:
    for copy in range(1000):
      suffix = f".{copy}" if copy else ""
      try:
        aside = self._rejected_folder()
        target = aside / f"{name}{suffix}"
        if target.exists():
          continue
        _move(self.directory / name, target)
        (aside / f"{target.name}.reason.txt").write_text(reason + "\n")
        return f"Moved checkpoint {name} to {target}"
      except OSError as error:
        problem = f"Checkpoint {name} cannot be moved to checkpoints_rejected ({error})"
        try:  # the folder of another user can be renamed, although it cannot be moved
          target = self.directory / f"{name}.rejected.{time.time_ns()}"
          _move(self.directory / name, target)
          return f"{problem}, it is renamed to {target.name}"
        except OSError:
          self._unusable.add(name)
          return f"{problem}, a save may overwrite it"
    raise AssertionError(f"1000 rejected checkpoints named {name}")

  def _rejected_folder(self) -> Any:
    """{run}/checkpoints_rejected, or the same with a number where something else has this name."""
    for copy in range(1000):
      aside = self.directory.parent / f"{self.directory.name}_rejected{f'.{copy}' if copy else ''}"
      with contextlib.suppress(FileExistsError):
        aside.mkdir(parents=True, exist_ok=True)
        return aside
    raise AssertionError("1000 files named checkpoints_rejected")


def _move(source: Any, target: Any) -> None:
  """Moves a folder; on an object store file by file, because gcsfs deletes the source even after a failed copy."""
  if "://" not in str(source):
    source.rename(target)
    return
  for name in checksums.walk(source):
    (source / name).copy(target / name)
  source.rmtree()
