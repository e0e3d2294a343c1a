"""The folders of a run's steps in storage: which are committed, damaged, half deleted, or not ours."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from input_pipeline.locks import FolderLock
from input_pipeline.places import Place
from input_pipeline.storage import StorageError
from trainer.checkpoint import checksums, run_folder
from trainer.checkpoint.checkpoint_errors import CheckpointError, Rejected
from trainer.checkpoint.meta import check_meta
from trainer.checkpoint.state_backup import LogLine
from trainer.checkpoint.together import on_primary
from trainer.observe import environment
from trainer.world import World

T = TypeVar("T")
STEP = re.compile("0|[1-9][0-9]{0,17}")  # the name of a step's folder; not 0050, nor digits of other scripts
UNFINISHED = ".orbax-checkpoint-tmp"
COMMIT = "commit_success.txt"
# Orbax's text, with the path at the time of the commit (a run's folder may have moved since).
COMMIT_TEXT = rf"Checkpoint commit was successful to .*/[0-9]+({re.escape(UNFINISHED)})?"
META = "meta.json"
MANIFEST = "manifest.json"
DELETED = "DELETED"
# Damaged checkpoints that stay: the owner can find the cause, or repair a state that is newer than the good ones.
REJECTED_KEPT = 2
_REASON = ".reason.txt"
# Orbax changes these files after the manifest is written. A restore does not read the first, and the text of the second
# is checked.
_UNSEALED = frozenset({"_CHECKPOINT_METADATA", COMMIT, MANIFEST})
# An object store checks a checksum of every object itself, and reading all files twice would double the time of a
# restore. There larger files have no CRC in the manifest, only their size; array data has its fingerprints.
_OBJECT_STORE_CRC_LIMIT = 1 << 20


def seal(folder: Place, meta: Mapping[str, Any]) -> None:
  """Writes the meta, with the versions of the libraries, and the manifest of all files. folder: of a step."""
  (folder / META).write_bytes(checksums.dump({**meta, "versions": environment.versions()}))
  limit = _OBJECT_STORE_CRC_LIMIT if folder.is_remote else None
  (folder / MANIFEST).write_bytes(checksums.dump(checksums.manifest(folder, _UNSEALED, limit)))


class StepFolders:
  """Lists, verifies, deletes and moves {directory}/{step}."""

  def __init__(self, directory: str, world: World, log: LogLine) -> None:
    self.directory = run_folder.folder(directory)
    self._world, self._log = world, log
    self._unusable: set[str] = set()  # rejected folders that could not be moved away: a save may overwrite them
    self._writing: FolderLock | None = None  # while this process writes a step

  def _on_primary(self, call: Callable[[], T]) -> T:
    return on_primary(self._world, call)

  def _folders(self, directory: Place | None = None) -> list[Place]:
    """The content of a folder; default: the one with the steps."""
    try:
      return list((directory or self.directory).iterdir())
    except FileNotFoundError:  # not made yet, or moved away by the user
      return []
    except NotADirectoryError as error:
      raise CheckpointError(f"{directory or self.directory} cannot be listed: it is a file. Move it away") from error

  def _committed(self, name: str) -> bool:
    path = self.directory / name
    return bool(STEP.fullmatch(name)) and _has(path / COMMIT) and not _has(path / DELETED)

  def steps(self) -> list[int]:
    """Committed steps, oldest first. They may be damaged: see `verify`."""
    return sorted(int(path.name) for path in self._folders() if self._committed(path.name))

  def commit_sealed(self) -> None:
    """On the primary. In an object store, commits the steps whose save has ended after it had sealed them, in an outage
    for example: all their files are there, and `verify` compares them with the manifest. Locally, a folder gets its
    final name after its commit, so a step that has only lost its marker is damaged."""
    for path in self._folders():
      if not path.is_remote or not STEP.fullmatch(path.name) or _has(path / COMMIT):
        continue
      if _has(path / MANIFEST) and not _has(path / DELETED):
        (path / COMMIT).write_text(f"Checkpoint commit was successful to {path}")
        self._log(f"Committed {path}: its save had ended after it had written all files.")

  def hold(self, step: int) -> FolderLock:
    """Retention of other processes leaves the committed step until the lock ends, on file systems that have locks.

    Raises Rejected if the step is gone.
    """
    held = FolderLock(self.directory / str(step), shared=True)
    if held.entered is False or self.is_gone(step):
      raise Rejected("it was deleted")
    return held

  def is_gone(self, step: int) -> bool:
    return not self._committed(str(step))

  def newest(self) -> tuple[int, float] | None:
    """(the newest committed step, when it was committed, in seconds since 1970; 0.0: unknown); None: there is none.

    Every process must call. Every process raises CheckpointError if the storage fails."""

    def find() -> list[tuple[int, float]]:
      at, steps = 0.0, self.steps()[-1:]
      for step in steps:
        with contextlib.suppress(OSError):
          at = (self.directory / str(step) / COMMIT).stat().modified
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
      if _half_deleted(path):
        try:
          remove_folder(path)
        except OSError as error:
          self._log(f"{path}, half deleted by retention, cannot be removed: {error}. Delete it.")
      elif STEP.fullmatch(step) and not self._committed(path.name):
        found[path.name] = not temporary and _has(path / MANIFEST)
    return found

  def _begin_to_write(self) -> None:
    """On the primary, before it writes a step. Removes the remnants, unless another process writes now."""
    self._writing = None  # after a save that has failed
    lock = self._writing = FolderLock(self.directory, shared=False)
    if lock.entered:
      self._remove_remnants()
    lock.share()

  def _end_writing(self, step: int, known: Collection[int]) -> None:
    """On the primary, after it has committed `step`. Without a lock, removes only what is older than this step: a
    process that perhaps still writes it has nothing to lose. known: committed steps."""
    lock, self._writing = self._writing, None
    if lock is not None and lock.entered is None:
      self._remove_remnants(lambda name: step_number(name) < step and name not in map(str, known))

  def _remnant(self, path: Place) -> str:
    """Returns why a folder is of no use any more, unless a living process is at work there; "" if it is not so.

    A folder with a temporary name was never committed. In an object store, every folder has its final name at once.
    """
    step, temporary, _ = path.name.partition(UNFINISHED)
    if not STEP.fullmatch(step):
      return ""
    if _half_deleted(path):
      return "its deletion did not finish"
    at_once = path.is_remote and not (path / COMMIT).exists() and not (path / MANIFEST).exists()
    return "its save did not finish" if temporary or at_once else ""

  def _remove_remnants(self, removable: Callable[[str], bool] = lambda name: True) -> None:
    """Removes what killed processes have left. That it fails is a line in the log."""
    try:
      found = {path: self._remnant(path) for path in self._folders() if removable(path.name)}
    except (CheckpointError, OSError) as error:
      self._log(f"Unfinished saves are not removed: {error}.")
      return
    removed = [f"{path.name} ({reason})" for path, reason in found.items() if reason and self._remove(path)]
    if removed:
      self._log(f"Removed {len(removed)} from {self.directory}: {', '.join(sorted(removed, key=step_number))}.")

  def _remove(self, path: Place) -> bool:
    """Whether a file or folder is removed; if not, the log says why."""
    try:
      if not path.is_remote and (os.path.islink(path) or not os.path.isdir(path)):
        os.unlink(path)
      else:
        remove_folder(path)
    except OSError as error:
      self._log(f"{path} cannot be removed: {error}. Delete it.")
      return False
    return True

  def states(self) -> dict[Place, str]:
    """{folder: why it is no checkpoint, or "" if it is committed} of all that are named like a step. Reads no data."""
    found = {}
    for path in self._folders():
      if self._committed(path.name):
        found[path] = ""
      elif step_number(path.name) >= 0 and ".rejected." in path.name:
        found[path] = "it was damaged, and could not be moved away"
      elif STEP.fullmatch(path.name.partition(UNFINISHED)[0]):
        found[path] = self._remnant(path) or f"it has no {COMMIT}"
    return found

  def is_being_written(self) -> bool | None:
    """Whether a process writes a step now; None: unknown, because the storage has no locks."""
    entered = FolderLock(self.directory, shared=False).entered
    return None if entered is None else not entered

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

  def _delete(self, name: str) -> bool:
    """Marks, uncommits, then removes: killed anywhere in between, the rest is never taken for a checkpoint.

    False: another process reads it, see `hold`.
    """
    path = self.directory / name
    if not path.exists():  # another process or the user was faster
      return True
    lock = FolderLock(path, shared=False)
    if lock.entered is False:
      return False
    (path / DELETED).write_text("being deleted by retention\n")
    (path / COMMIT).unlink(missing_ok=True)
    remove_folder(path)
    return True

  def set_aside(self, rejected: Mapping[str, str]) -> None:
    """Moves folders, {name: reason}, to {run}/checkpoints_rejected, each with its reason in a file alongside.

    The newest REJECTED_KEPT stay there; older ones are deleted. Saves that did not finish are deleted at once, unless
    another process writes now.
    """
    names = sorted(rejected, key=step_number)  # the newest step last, so that it stays
    moved = self._on_primary(lambda: self._clean_up(names, rejected))
    for line in moved:
      self._log(line)

  def _clean_up(self, names: Sequence[str], rejected: Mapping[str, str]) -> list[str]:
    """As `set_aside`, on the primary. Returns a line for each folder that was moved."""
    lock = FolderLock(self.directory, shared=False)
    if lock.entered is not False and self._writing is None:
      self._remove_remnants()
    damaged = [name for name in names if not self._remnant(self.directory / name)]
    moved = [f"{self._set_aside(name, rejected[name])}: {rejected[name]}" for name in damaged]
    self._delete_old_rejected()
    return moved

  def rejected(self) -> dict[Place, str]:
    """{folder: reason} of the damaged checkpoints that were moved away, the oldest first. On the primary."""
    found = []
    for aside in self._folders(self.directory.parent):
      if aside.name.partition(".")[0] == f"{self.directory.name}_rejected" and aside.is_dir():
        names = {path.name: path for path in self._folders(aside)}
        found += [(path, names[f"{name}{_REASON}"]) for name, path in names.items() if f"{name}{_REASON}" in names]
    found.sort(key=lambda pair: (pair[1].stat().modified, step_number(pair[0].name)))
    return {path: reason.read_bytes().decode(errors="replace").strip() for path, reason in found}

  def _delete_old_rejected(self) -> None:
    try:
      old = list(self.rejected())[:-REJECTED_KEPT]
    except (CheckpointError, OSError) as error:
      self._log(f"Damaged checkpoints are not deleted: {error}.")
      return
    for path in old:
      if self._remove(path):
        (path.parent / f"{path.name}{_REASON}").unlink(missing_ok=True)
        self._log(f"Deleted {path}: the newest {REJECTED_KEPT} damaged checkpoints are kept.")

  def _set_aside(self, name: str, reason: str) -> str:
    for copy in range(1000):
      suffix = f".{copy}" if copy else ""
      try:
        aside = self._rejected_folder()
        target = aside / f"{name}{suffix}"
        if target.exists():
          continue
        _move(self.directory / name, target)
        (aside / f"{target.name}{_REASON}").write_text(reason + "\n")
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

  def _rejected_folder(self) -> Place:
    """{run}/checkpoints_rejected, or the same with a number where something else has this name."""
    for copy in range(1000):
      aside = self.directory.parent / f"{self.directory.name}_rejected{f'.{copy}' if copy else ''}"
      with contextlib.suppress(FileExistsError):
        aside.mkdir(parents=True, exist_ok=True)
        return aside
    raise AssertionError("1000 files named checkpoints_rejected")


def step_number(name: str) -> int:
  """The step in the name of a folder; -1: none."""
  digits = re.match("[0-9]+", name)
  return int(digits[0]) if digits else -1


def _has(path: Place) -> bool:
  """Whether there is such a file. A folder of another user, which may not be read, counts as empty."""
  try:
    return path.exists()
  except StorageError as error:
    if error.errno != errno.EACCES:
      raise
    return False


def _half_deleted(path: Place) -> bool:
  """Whether a process was killed while it deleted this folder: the mark is there, or nothing is left of a step."""
  if _has(path / DELETED):
    return True
  if path.is_remote or not STEP.fullmatch(path.name) or not path.is_dir():
    return False
  try:
    return not any(path.iterdir())
  except StorageError as error:
    if error.errno != errno.EACCES:  # of another user
      raise
    return False


def remove_folder(path: Place) -> None:
  """Removes a folder, the mark of its deletion last: what a kill leaves is half deleted, and not damaged."""
  for child in path.iterdir() if (path / DELETED).exists() else ():
    if child.name != DELETED:
      child.rmtree() if child.is_dir() and not os.path.islink(child) else child.unlink()
  path.rmtree()


def _move(source: Place, target: Place) -> None:
  """Moves a folder; on an object store file by file, because gcsfs deletes the source even after a failed copy."""
  if not source.is_remote:
    source.rename(target)
    return
  for name in checksums.walk(source):
    (source / name).copy(target / name)
  source.rmtree()
