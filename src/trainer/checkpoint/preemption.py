"""SIGTERM: the first asks for a save after the step under way, the second ends the process at once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

from trainer.config.schema import CheckpointSection

_SECOND_SIGTERM = 143  # 128 + SIGTERM: what a shell reports for a process that the signal killed


class Preemption:
  """Listens for SIGTERM inside `with`. One per process, entered in the main thread after jax.distributed.

  Several processes agree on the step through JAX's preemption service, which has its own listener (one of our own
  would take its place); a single process needs no service.
  """

  def __init__(self, cfg: CheckpointSection, log: Callable[[str], None]) -> None:
    self._enabled = cfg.enable_autocheckpoint and cfg.enable_checkpointing
    self._grace_seconds = cfg.autocheckpoint_grace_seconds
    self._log = log
    self._received: float | None = None
    self._previous: Any = None
    self._several = False

  def __enter__(self) -> Self:
    import jax

    self._several = jax.process_count() > 1
    if self._enabled and not self._several:
      self._previous = signal.signal(signal.SIGTERM, self._on_signal)
    return self

  def __exit__(
    self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
  ) -> None:
    if self._previous is not None:
      signal.signal(signal.SIGTERM, self._previous)

  def requested(self, step: int) -> bool:
    """Whether to save after `step` and stop. To be asked once for every step; the same answer on all processes."""
    if not self._enabled:
      return False
    if self._several and self._received is None:
      from jax.experimental import multihost_utils

      if multihost_utils.reached_preemption_sync_point(step):
        self._received = time.monotonic()
        # The service has done its work: from here on a signal is the second one.
        self._previous = signal.signal(signal.SIGTERM, self._on_signal)
    if self._received is None:
      return False
    self._log(f"SIGTERM: saving after step {step} and stopping; {self.seconds_left:.0f} s of grace left")
    return True

  @property
  def seconds_left(self) -> float:
    """Time until the kill that the scheduler has announced; only meaningful once `requested`."""
    assert self._received is not None
    return max(0.0, self._received + self._grace_seconds - time.monotonic())

  def _on_signal(self, number: int, frame: FrameType | None) -> None:
    if self._received is not None:
      os._exit(_SECOND_SIGTERM)
    self._received = time.monotonic()
