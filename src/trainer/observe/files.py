"""Append-only line files that survive a kill, on local folders and on object stores.

Local: one write(2) with O_APPEND per line and no buffer in Python, so a kill loses at most the line being written.
Object stores cannot append: lines go to numbered part objects `{name}.000000`, `{name}.000001`, ... Only the newest
part of this process is rewritten (every `period` seconds, from a thread), so a kill loses at most the last `period`
seconds. Readers see both forms as one sequence of lines.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import itertools
import json
import math
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from input_pipeline import places, remote, storage
from input_pipeline.places import Place

LONGEST_WAIT_SECONDS = 10.0  # of a checkpoint, or of the end of a process, for a destination that does not answer
_SHORT_WAIT_SECONDS = 1.0  # for a destination whose last answer was an error
_PARSED_TOGETHER = 64  # lines of JSON


class LineFile:
  """Where lines go. All methods may be called from any thread. This class discards the lines."""

  def append(self, line: str) -> bool:
    """Adds one line (without its newline). An I/O error is reported on stderr, never raised: a full disk under the
    log must not end the training. False: the line is lost."""
    return True

  def flush(self) -> None:
    """Returns when readers can see all lines so far, or when the storage has failed to take them."""

  def close(self) -> None:
    """Flushes and releases the file. Closing twice is allowed; appending afterwards does nothing."""


def check_address(directory: str) -> None:
  """Raises ConfigError for an address that is not on an object store which this program can read."""
  remote.require_address(directory, directory)


def exists(directory: str) -> bool:
  return places.at(directory).exists()


def open_lines(directory: str | None, name: str) -> LineFile:
  """The line file `name` of a run directory, created or continued. With directory=None, lines are discarded."""
  if directory is None:
    return LineFile()
  return ObjectLines(directory, name) if storage.is_address(directory) else LocalLines(Path(directory) / name)


class LocalLines(LineFile):
  """A local file, one write per line: the kernel has every line at once, so there is nothing to flush."""

  def __init__(self, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    self._path = path
    self._lock = threading.Lock()
    self._failing = False
    self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    size = os.fstat(self._fd).st_size
    # A process killed during a write leaves half a line; a newline separates it from the next line.
    self._torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"

  def append(self, line: str) -> bool:
    data = _encode(line)
    with self._lock:
      if self._fd < 0:
        return False
      if self._torn:
        data = b"\n" + data
      try:
        written = os.write(self._fd, data)
        if written != len(data):  # the disk is full: remove the half line
          os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
          raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._torn = self._failing = False
      except OSError as error:
        if not self._failing:  # once per outage, not once per line
          lost = "lines are lost until writing works again"
          print(f"warning: cannot write {self._path}: {error}; {lost}", file=sys.stderr)
        self._failing = True
      return not self._failing

  def close(self) -> None:
    with self._lock:
      if self._fd >= 0:
        os.close(self._fd)
        self._fd = -1


class ObjectLines(LineFile):
  """Numbered part objects. A thread rewrites the newest part when it has new lines."""

  def __init__(self, directory: str, name: str, *, period: float = 10.0, part_bytes: int = 4 << 20) -> None:
    self._stem = f"{directory.rstrip('/')}/{name}"
    self._part_bytes = part_bytes
    self._part = -1  # looked for in the thread
    self._directory, self._name = directory, name
    self._data = bytearray()
    self._dirty = False
    self._failing = False
    self._lock = threading.Lock()  # guards the buffer
    self._upload_lock = threading.Lock()  # one upload at a time, in order
    self._stop = threading.Event()
    self._thread = threading.Thread(target=self._run, args=(period,), name=f"upload {name}", daemon=True)
    self._thread.start()

  def append(self, line: str) -> bool:
    with self._lock:
      if not self._stop.is_set():
        self._data += _encode(line)
        self._dirty = True
      return not self._stop.is_set()

  def flush(self) -> None:
    """Waits LONGEST_WAIT_SECONDS at most, and less in an outage: the training waits, and the thread tries again."""
    most = _SHORT_WAIT_SECONDS if self._failing else LONGEST_WAIT_SECONDS
    if self._upload_lock.acquire(timeout=most):
      try:
        self._upload(most)
      finally:
        self._upload_lock.release()

  def _upload(self, most: float) -> None:
    """most: seconds that the storage may take. The caller holds the lock of uploads."""
    with storage.limited(most, is_silent=True):
      with self._lock:
        if not self._dirty:
          return
      if self._part < 0 and not self._find_part():
        return
      with self._lock:
        data, part = bytes(self._data), self._part
        self._dirty = False
        if len(data) >= self._part_bytes:
          self._data, self._part = bytearray(), part + 1
      if not self._try(lambda: Place(f"{self._stem}.{part:06d}").write_bytes(data)):
        with self._lock:
          if self._part != part:  # the part was full and closed: put its lines back
            self._data, self._part = bytearray(data) + self._data, part
          self._dirty = True

  def _find_part(self) -> bool:
    """Whether it is known which part comes next: no part of an earlier process is written again."""

    def find() -> None:
      self._part = 1 + max((part for part, _ in _parts(self._directory, self._name)), default=-1)

    return self._try(find)

  def _try(self, work: Callable[[], None]) -> bool:
    """Whether the storage does the work now; a warning once per outage."""
    try:
      work()
    except OSError as error:
      if not self._failing:
        print(f"warning: {error}; will try again", file=sys.stderr)
      self._failing = True
      return False
    self._failing = False
    return True

  def close(self) -> None:
    if self._stop.is_set():
      return
    self._stop.set()
    self._thread.join(LONGEST_WAIT_SECONDS)
    if self._thread.is_alive():  # a daemon: the interpreter's end does not wait for it
      lost = f"no answer for {LONGEST_WAIT_SECONDS:g} s; its last lines are lost"
      print(f"warning: {self._stem}: {lost}", file=sys.stderr)

  def _run(self, period: float) -> None:
    while not self._stop.wait(period):
      self._upload_all()
    self._upload_all()

  def _upload_all(self) -> None:
    with self._upload_lock:
      self._upload(LONGEST_WAIT_SECONDS)


def _encode(line: str) -> bytes:
  # Sampled text may hold lone surrogates: escape them instead of failing.
  return line.encode("utf-8", "backslashreplace") + b"\n"


def _parts(directory: str, name: str) -> list[tuple[int, Place]]:
  found = [(path.name[len(name) + 1 :], path) for path in places.at(directory).glob(f"{glob.escape(name)}.*")]
  return sorted((int(number), path) for number, path in found if number.isdigit())


def signature(directory: str, name: str) -> Sequence[object]:
  """A value that changes when the line file grows or is replaced; empty if there is no such file."""
  if storage.is_address(directory):
    found = [(path.name, path.stat()) for _, path in _parts(directory, name)]
    return [(part, of.size, of.modified) for part, of in found]
  with contextlib.suppress(FileNotFoundError):
    status = os.stat(Path(directory) / name)
    return status.st_ino, status.st_size, status.st_mtime_ns
  return ()


def read_lines(directory: str, name: str) -> Iterator[str]:
  """Lines of the line file `name`, in the order in which they were appended; none if there is no such file.

  Reads as it goes: a file of a million lines is never in memory as a whole.
  """
  if storage.is_address(directory):
    for _, part in _parts(directory, name):
      # Not splitlines(): sampled text may hold other line separators.
      yield from part.read_bytes().decode("utf-8", "replace").removesuffix("\n").split("\n")
    return
  with contextlib.suppress(FileNotFoundError, NotADirectoryError), (places.at(directory) / name).open() as file:
    for line in file:
      yield line.decode("utf-8", "replace").removesuffix("\n")


def cut_lines(directory: str, name: str, keeps: Callable[[bytes], bool]) -> None:
  """Removes the first line for which keeps(line, with its newline) is false, and all lines after it. No process may
  have the file open."""
  if not storage.is_address(directory):
    with contextlib.suppress(FileNotFoundError), (Path(directory) / name).open("r+b") as file:
      file.truncate(sum(map(len, itertools.takewhile(keeps, file))))
    return
  for _, path in reversed(_parts(directory, name)):  # so that a kill leaves the beginning of the lines
    lines = path.read_bytes().splitlines(keepends=True)
    kept = list(itertools.takewhile(keeps, lines))
    if len(kept) == len(lines):
      return
    if kept:
      path.write_bytes(b"".join(kept))
      return
    path.unlink()


def read_last_json_lines(directory: str, name: str, size: int = 1 << 17) -> Iterator[dict[str, Any]]:
  """The records in about the last `size` bytes of a line file of JSON objects; of an object store, in its last part."""
  if storage.is_address(directory):
    parts = _parts(directory, name)
    data = parts[-1][1].read_bytes() if parts else b""
  else:
    path = Path(directory) / name
    if not path.exists():
      return
    with path.open("rb") as file:
      start = max(0, file.seek(0, os.SEEK_END) - size)
      file.seek(start)
      data = file.read()
    if start:
      data = data.partition(b"\n")[2]  # the first line is cut
  yield from _parse(data.decode("utf-8", "replace").splitlines())


def known(read: Callable[[], Iterable[dict[str, Any]]]) -> list[dict[str, Any]]:
  """The records that read() finds; [] if the storage fails: records may be written twice, and none is lost."""
  try:
    return list(read())
  except OSError as error:
    print(f"warning: {error}; some records may be written twice", file=sys.stderr)
    return []


def write_text(directory: str, name: str, text: str) -> None:
  """Writes a whole file of a run directory, local (atomically) or on an object store."""
  write_bytes(directory, name, text.encode("utf-8", "backslashreplace"))


def write_bytes(directory: str, name: str, data: bytes) -> None:
  place = places.at(directory) / name
  place.parent.mkdir(parents=True, exist_ok=True)
  place.write_bytes(data)


def dump_json(record: dict[str, Any]) -> str:
  """One line of strict JSON. Floats keep every bit (repr); nan and infinities become strings "nan", "inf", "-inf"."""
  return json.dumps(_plain(record), allow_nan=False)


def _plain(value: Any) -> Any:
  if isinstance(value, dict):
    return {str(key): _plain(item) for key, item in value.items()}
  if isinstance(value, list | tuple | set | frozenset):
    return [_plain(item) for item in (sorted(value) if isinstance(value, set | frozenset) else value)]
  if hasattr(value, "item") and not isinstance(value, str | bytes):  # numpy and jax scalars
    value = value.item()
  if isinstance(value, float) and not math.isfinite(value):
    return repr(value)
  if value is None or isinstance(value, bool | int | float | str):
    return value
  return str(value)


def read_json_lines(directory: str, name: str) -> Iterator[dict[str, Any]]:
  """The records of a line file of JSON objects. Lines that a kill cut short are skipped."""
  lines = read_lines(directory, name)
  while batch := list(itertools.islice(lines, _PARSED_TOGETHER)):
    yield from _parse(batch)


def _parse(lines: list[str]) -> list[dict[str, Any]]:
  """The records in `lines` that are whole. Together, lines parse a third faster than one by one."""
  values: list[Any] = []
  with contextlib.suppress(json.JSONDecodeError):
    values = json.loads(f"[{','.join(lines)}]")
  if len(values) != len(lines):
    values = []
    for line in lines:
      with contextlib.suppress(json.JSONDecodeError):
        values.append(json.loads(line))
  return [value for value in values if isinstance(value, dict)]
