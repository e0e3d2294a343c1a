"""A cache of folders that are expensive to make. Each is made once and atomically, also when processes race."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from input_pipeline import storage
from input_pipeline.input_errors import ConfigError
from input_pipeline.locks import locked

Log = Callable[[str], None]


def entry(
  directory: str, name: str, *, build: Callable[[Path], None], fault: Callable[[Path], str | None], log: Log
) -> Path:
  """The folder {directory}/{name}, made by `build` if it is absent or damaged; see `found`."""

  def named(folder: Path) -> str:
    build(folder)
    return name

  return found(directory, name, find=lambda: name, build=named, fault=fault, log=log)


def found(
  directory: str,
  work: str,
  *,
  find: Callable[[], str | None],
  build: Callable[[Path], str],
  fault: Callable[[Path], str | None],
  log: Log,
) -> Path:
  """The folder in `directory` with the name that `find` returns, or, if there is none, that `build` returns.

  work: a name that processes share which want the same folder.
  `build` fills an empty temporary folder, which is then renamed: a killed build leaves no entry, a failed build leaves
  no files, and the next build of any entry deletes the folders of killed ones. `fault` returns what is wrong with a
  finished entry, or None. Processes that want the same entry wait for the first process; a good entry needs neither a
  lock nor write permission. Raises ConfigError when the directory cannot be written.
  """
  if storage.is_address(directory):
    raise ConfigError(f"dataset_cache_directory={directory} is not a local path. Set it to a folder of this machine.")
  root = Path(directory).expanduser()
  if (name := find()) and (root / name).is_dir() and fault(root / name) is None:
    return root / name
  fresh = [folder for folder in (root, *root.parents) if not folder.exists()]
  with ExitStack() as stack:
    stack.callback(_remove_empty, fresh)
    try:
      lock = stack.enter_context(_locked(root / f".{work}.lock"))
      temporary = Path(tempfile.mkdtemp(prefix=f".{work}.{_place(root)}-", dir=root))
    except OSError as error:
      problem = f"dataset_cache_directory={directory} cannot be written: {error}"
      raise ConfigError(f"{problem}. Give another folder.") from error
    stack.callback(shutil.rmtree, temporary, ignore_errors=True)
    if lock is None:
      log(f"The file system of {root} has no locks (flock): processes that prepare the same data do it several times.")
    if (name := find()) and (final := root / name).is_dir():
      reason = fault(final)
      if reason is None:
        return final
      log(f"The cached {final} is damaged ({reason}). Making it again.")
      with suppress(FileNotFoundError):  # without locks another process may do the same
        final.rename(temporary / "damaged")
    _delete_old(root, work if lock else "", temporary, log)
    whole = temporary / "whole"
    whole.mkdir()
    final = root / build(whole)
    try:
      whole.rename(final)
    except OSError:
      # On a shared file system another host may not see the lock. If it renamed first, its entry is the same.
      if not final.is_dir():
        raise
  return final


def value(directory: str, name: str, file: str, *, compute: Callable[[], Any], log: Log) -> Any:
  """The JSON value in {directory}/{name}/{file}, computed if the cache does not have it. Otherwise as `entry`."""

  def build(folder: Path) -> None:
    (folder / file).write_text(json.dumps(compute()))

  def fault(folder: Path) -> str | None:
    return None if (folder / file).is_file() else f"{file} is absent"

  return json.loads((entry(directory, name, build=build, fault=fault, log=log) / file).read_text())


def known(directory: str, name: str, file: str) -> Any:
  """The value that `value` has computed before, or None."""
  try:
    return json.loads((Path(directory).expanduser() / name / file).read_text())
  except (OSError, ValueError):
    return None


def _remove_empty(folders: Iterable[Path]) -> None:
  with suppress(OSError):  # not empty: in use
    for folder in folders:
      folder.rmdir()


def _place(root: Path) -> str:
  """8 hex digits of this kernel and this mount: processes with the same digits see each other's locks in `root`."""
  try:
    kernel = Path("/proc/sys/kernel/random/boot_id").read_text()
  except OSError:  # not Linux
    kernel = platform.node()
  return hashlib.sha256(f"{kernel} {root.stat().st_dev}".encode()).hexdigest()[:8]


def _delete_old(root: Path, ours: str, temporary: Path, log: Log) -> None:
  """Deletes the temporary folders of processes that were killed. `ours`: the entry whose lock this process has, or "".

  Names the folders whose processes may be alive without a lock that is visible here.
  """
  here, unknown = _place(root), []
  for folder in sorted(path for path in root.glob(".*-????????") if path.is_dir() and path.name != temporary.name):
    name, _, place = folder.name[1:-9].rpartition(".")
    if place != here:
      unknown.append(str(folder))
      continue
    # An OSError: it belongs to another user.
    with suppress(OSError), nullcontext(True) if name == ours else _locked(root / f".{name}.lock", wait=False) as lock:
      if lock is None:
        unknown.append(str(folder))
      elif lock and folder.is_dir():  # its process neither lives nor has just ended
        shutil.rmtree(folder)
        log(f"Deleted {folder} of a preparation that was killed")
  if unknown:
    log(
      f"{root} has {len(unknown)} unfinished preparations of processes that may run on another host: "
      f"{', '.join(unknown[:3])}{', ...' * (len(unknown) > 3)}. Delete these folders if no process prepares data."
    )


@contextmanager
def _locked(path: Path, *, wait: bool = True) -> Iterator[bool | None]:
  """Holds an exclusive lock on a file that exists only while locked. The lock ends with the process.

  Yields whether it holds the lock; None: the file system has no locks. Without `wait`, False: another process has it.
  """
  while True:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
      descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except FileNotFoundError:  # another process, whose build has failed, removes the empty folder
      continue
    try:
      held = locked(descriptor, shared=False, wait=wait)
      if held is False:
        yield False
        return
      if _is_at(descriptor, path):
        try:
          yield held
        finally:
          path.unlink(missing_ok=True)
        return
      # The previous holder removed the file, so another process may hold the lock on a new file.
    finally:
      os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
  """Whether the open file is still the file at `path`."""
  try:
    return os.path.samestat(os.fstat(descriptor), path.stat())
  except FileNotFoundError:
    return False
