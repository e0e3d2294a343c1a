"""Memory that is freed goes back to the system at once, for as long as a restore lasts."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

M_MMAP_THRESHOLD = -3  # malloc.h
BLOCK = 1 << 20
# The value that glibc itself ends at: it raises the threshold to the size of each block that is freed, up to this.
USUAL = 32 << 20


@contextlib.contextmanager
def return_freed_memory() -> Iterator[None]:
  """Blocks of a mebibyte and more are mapped one by one and unmapped when freed.

  Otherwise glibc keeps the buffers through which a restore reads, in fragments: measured, a third of the state.
  Elsewhere (macOS, musl) this does nothing.
  """
  libc = ctypes.CDLL(None)
  if not hasattr(libc, "mallopt"):
    yield
    return
  libc.mallopt(M_MMAP_THRESHOLD, BLOCK)
  try:
    yield
  finally:
    libc.mallopt(M_MMAP_THRESHOLD, USUAL)
    libc.malloc_trim(0)
