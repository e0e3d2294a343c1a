"""JAX's persistent compilation cache, with entries that cannot be read replaced.

JAX writes an entry in place, so a process that is killed leaves a truncated one, and it never overwrites an entry. It
compiles again, with a warning, at every start. Here the warning removes the entry before JAX writes the new one.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import warnings
import zlib
from collections.abc import Callable
from typing import Any

_UNREADABLE = r"Error reading persistent compilation cache entry for '(?P<module>[^']*)': (?P<reason>.*)"


def enable(directory: str) -> None:
  """Keeps compiled programs in `directory` (local or gs://; empty: nowhere). Called once, before any compilation."""
  import jax

  if not directory:
    return
  directory = os.path.expanduser(directory)
  jax.config.update("jax_compilation_cache_dir", directory)
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  warnings.filterwarnings("always", message="Error reading persistent compilation cache entry")
  warnings.showwarning = _Repair(directory, warnings.showwarning)


class _Repair:
  """A warnings.showwarning that removes the unreadable entry JAX warns of, and passes other warnings on. JAX calls it
  in the compiling thread, between reading the entry and compiling."""

  def __init__(self, directory: str, show: Callable[..., None]) -> None:
    self._directory, self._show = directory, show
    self._lock = threading.Lock()
    self._reported = False

  def __call__(self, message: Warning | str, *arguments: Any, **options: Any) -> None:
    found = re.match(_UNREADABLE, str(message), re.DOTALL)
    if found is None:
      self._show(message, *arguments, **options)
      return
    with self._lock:
      first, self._reported = not self._reported, True
      if first:
        print(
          f"warning: the compilation cache {self._directory} has entries that cannot be read ({found['module']}: "
          f"{found['reason']}), perhaps of a process that was killed; these programs are compiled again",
          file=sys.stderr,
          flush=True,
        )
      try:
        remove_unreadable(self._directory, found["module"])
      except OSError as error:
        print(f"warning: {found['module']} is compiled at every start: {error}", file=sys.stderr, flush=True)


def remove_unreadable(directory: str, module: str) -> None:
  """Removes the damaged entries of a module (JAX's warning names no entry), or all its entries if none looks damaged. A
  lost entry costs a compilation."""
  from etils import epath

  entries = list(epath.Path(directory).glob(f"{module}-*-cache"))  # {module}-{hash}-cache
  for entry in [entry for entry in entries if _is_damaged(entry.read_bytes())] or entries:
    entry.unlink(missing_ok=True)


def _is_damaged(data: bytes) -> bool:
  """Whether `data` is not a whole zlib stream, whose checksum covers every byte."""
  try:
    zlib.decompress(data)
  except zlib.error:
    return True
  return False
