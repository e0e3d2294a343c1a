"""JAX's persistent compilation cache, with entries that cannot be read replaced.

JAX writes an entry in place, so a process that is killed leaves a truncated one, and it never overwrites an entry. It
compiles again, with a warning, at every start. Here the warning removes the entries of the module before JAX writes the
new one.
"""

from __future__ import annotations

import builtins
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

from input_pipeline import places

_FAILURE = (
  r"Error (?P<what>reading|writing) persistent compilation cache entry for '(?P<module>[^']*)': "
  r"(?P<reason>(?P<type>\w*).*)"
)


def enable(directory: str) -> Callable[[], None]:
  """Keeps compiled programs in `directory` (local or gs://; empty: nowhere). Returns what ends this, for a process that
  outlives the run."""
  import jax

  if not directory:
    return lambda: None
  directory = os.path.expanduser(directory)
  before = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
  show, filters = warnings.showwarning, list(warnings.filters)
  _set(directory, 0.0)
  warnings.filterwarnings("always", message="Error (reading|writing) persistent compilation cache entry")
  added = warnings.filters[0]
  repair = warnings.showwarning = _Repair(directory, show)

  def end() -> None:
    _set(*before)
    if warnings.showwarning is repair:
      warnings.showwarning = show
    if added not in filters and added in warnings.filters:
      warnings.filters.remove(added)  # type: ignore[attr-defined]

  return end


def _set(directory: str | None, least_seconds: float) -> None:
  import jax
  from jax.experimental.compilation_cache import compilation_cache

  if directory != jax.config.jax_compilation_cache_dir:
    jax.config.update("jax_compilation_cache_dir", directory)
    compilation_cache.reset_cache()  # JAX opens a folder only once
  jax.config.update("jax_persistent_cache_min_compile_time_secs", least_seconds)


class _Repair:
  """A warnings.showwarning that removes the unreadable entry JAX warns of, and passes other warnings on. JAX calls it
  in the compiling thread, between reading the entry and compiling."""

  def __init__(self, directory: str, show: Callable[..., None]) -> None:
    self._directory, self._show = directory, show
    self._lock = threading.Lock()
    self._reported = False

  def __call__(self, message: Warning | str, *arguments: Any, **options: Any) -> None:
    found = re.match(_FAILURE, str(message), re.DOTALL)
    if found is None:
      self._show(message, *arguments, **options)
      return
    kind = getattr(builtins, found["type"], None)
    unusable = found["what"] == "writing" or (isinstance(kind, type) and issubclass(kind, OSError))
    with self._lock:
      first, self._reported = not self._reported, True
      if first:
        print(f"warning: {self._unusable(found) if unusable else self._damaged(found)}", file=sys.stderr, flush=True)
      if unusable:
        return
      try:
        for entry in places.at(self._directory).glob(f"{found['module']}-*-cache"):  # the warning names only the module
          entry.unlink(missing_ok=True)
      except OSError as error:
        print(f"warning: {found['module']} is compiled at every start: {error}", file=sys.stderr, flush=True)

  def _unusable(self, found: re.Match[str]) -> str:
    return (
      f"jax_cache_dir={self._directory}: {found['what']} failed ({found['reason']}); programs are compiled again at "
      "every start. Set jax_cache_dir to a folder that this user can write, or jax_cache_dir= for no cache"
    )

  def _damaged(self, found: re.Match[str]) -> str:
    return (
      f"the compilation cache {self._directory} has entries that cannot be read ({found['module']}: "
      f"{found['reason']}), perhaps of a process that was killed; these programs are compiled again"
    )
