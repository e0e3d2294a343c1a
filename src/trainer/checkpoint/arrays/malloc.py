"""Makes malloc return freed memory to the system at once, during a restore."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

M_MMAP_THRESHOLD = -3  # malloc.h
BLOCK = 1 << 20
# glibc raises the threshold to the size of each freed block, up to this value.
USUAL = 32 << 20


@contextlib.contextmanager
def return_freed_memory() -> Iterator[None]:
  """Context in which blocks of 1 MiB and more are mapped one by one, and unmapped when freed.

  Otherwise glibc keeps the read buffers of a restore in fragments: a third of the size of the state, measured. Does
  nothing without glibc (macOS, musl).
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
