"""The barriers of a save by several processes. A process that fails lets the others know: they must not wait for it."""

from __future__ import annotations

import contextlib
from typing import Any

import jax

from trainer.checkpoint.checkpoint_errors import SaveFailed

# Orbax measures its timeouts with the wall clock, and a clock that is corrected must not fail a save. A save that
# hangs is noticed by the watchdog and by the heartbeats of jax.distributed.
NO_TIMEOUT_SECONDS = 10 * 365 * 24 * 3600


class SaveBarriers:
  """Orbax waits at two barriers: when all processes have written, and when the first process has committed."""

  def __init__(self, name: str, rank: int) -> None:
    """name: of the save; the same on every process, and never used again."""
    from orbax.checkpoint import multihost

    self._client: Any = multihost.get_jax_distributed_client()
    self._name, self._rank, self._left = name, rank, ["written", "committed"]

  def wait(self) -> None:
    """Waits at the next barrier. Raises SaveFailed, on every process, if one of them has failed before it."""
    self._arrive()
    if failed := self._client.key_value_dir_get(f"{self._name}/"):
      raise SaveFailed(min(failed)[1])

  def fail(self, reason: str) -> None:
    """Ends the save on every process. Returns when no process writes any more, or one of them has died."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):
      self._client.key_value_set(f"{self._name}/{self._rank}", reason)
      while self._left:
        self._arrive()

  def _arrive(self) -> None:
    """Waits at the next barrier for all processes."""
    self._client.wait_at_barrier(f"{self._name}.{self._left.pop(0)}", NO_TIMEOUT_SECONDS * 1000)
