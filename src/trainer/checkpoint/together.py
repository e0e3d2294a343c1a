"""Runs work on every process. If it fails on one process, it raises on all, before the next collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from trainer import world as world_lib
from trainer.checkpoint.checkpoint_errors import CheckpointError, NonFiniteState, Rejected, SaveFailed
from trainer.config.errors import ConfigError
from trainer.world import World

T = TypeVar("T")
# The first kind that occurs is raised.
_KINDS: tuple[type[Exception], ...] = (NonFiniteState, SaveFailed, CheckpointError, Rejected)


def together(world: World, work: Callable[[], T]) -> T:
  """work() if it succeeds on every process. Every process raises what one of them raises."""
  error: Exception | None = None
  cause: Exception | None = None
  try:
    result = work()
  except (CheckpointError, Rejected) as raised:
    error = raised
  except OSError as raised:
    error, cause = CheckpointError(str(raised)), raised
  kind = next((i for i, known in enumerate(_KINDS) if isinstance(error, known)), len(_KINDS))
  first, reason = min(world.gather([kind, str(error)]), key=lambda found: int(found[0]))
  if first < len(_KINDS):
    raise _KINDS[first](reason) from cause or error
  return result


def on_primary(world: World, call: Callable[[], T]) -> T:
  """The JSON value of call() on the primary, on every process. If it fails, every process raises its ConfigError, or
  CheckpointError for a failure of storage."""
  value: Any = None
  failed: Any = ""
  cause: Exception | None = None
  if world.is_primary:
    try:
      value = call()
    except ConfigError as error:
      failed, cause = ["input", str(error)], error
    except (CheckpointError, OSError) as error:
      failed, cause = ["storage", str(error)], error
  value, failed = world_lib.from_primary(world, [value, failed])
  if failed:
    raise (ConfigError if failed[0] == "input" else CheckpointError)(failed[1]) from cause
  return value
