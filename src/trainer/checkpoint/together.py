"""Runs work on every process. If it fails on one process, it raises on all, before the next collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from trainer.checkpoint.errors import CheckpointError, NonFiniteState, Rejected, SaveFailed
from trainer.world import World

T = TypeVar("T")
# The first kind that occurs is raised.
_KINDS: tuple[type[Exception], ...] = (NonFiniteState, SaveFailed, CheckpointError, Rejected)


def together(world: World, work: Callable[[], T]) -> T:
  """work() if it succeeds on every process. Every process raises what one of them raises."""
  error: Exception | None = None
  try:
    result = work()
  except (CheckpointError, Rejected) as raised:
    error = raised
  kind = next((i for i, known in enumerate(_KINDS) if isinstance(error, known)), len(_KINDS))
  first, reason = min(world.gather([kind, str(error)]), key=lambda found: int(found[0]))
  if first < len(_KINDS):
    raise _KINDS[first](reason) from error
  return result
