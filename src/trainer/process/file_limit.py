"""How many files this process may have open."""

from __future__ import annotations

import contextlib
import resource

_WANTED = 2**16  # above the needs of a run; hard limits of 10^9 exist, and libraries may make tables of this size


def raise_limit() -> None:
  """Raises the soft limit of open files (often 1,024, or 256) to the hard limit, and to at most 65,536."""
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  wanted = _WANTED if hard == resource.RLIM_INFINITY else min(hard, _WANTED)
  if soft != resource.RLIM_INFINITY and soft < wanted:
    with contextlib.suppress(ValueError, OSError):  # macOS has another, lower limit; the run may need no more files
      resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
