"""Whether the run must save and end. A request (SIGTERM, ...) to one process is one to all, and all agree on a step."""

from __future__ import annotations

from collections.abc import Callable

from trainer.config.schema import CheckpointSection
from trainer.process.signals import Signals
from trainer.world import World


class Preemption:
  """Answers after each step whether to save and end. Made once per process, after jax.distributed has started."""

  def __init__(
    self,
    cfg: CheckpointSection,
    world: World,
    signals: Signals,
    log: Callable[[str], None] = lambda line: None,
    emit: Callable[..., object] = lambda kind, **fields: None,
    agreed: Callable[[], bool] | None = None,
    asked: Callable[[], bool] = lambda: False,
  ) -> None:
    """agreed: whether the worlds of the run have agreed that this process ends after the last step; None: `world` is
    the whole run. asked: whether another process was asked to end the whole run. log takes a line, emit a kind and
    fields for events.jsonl.

    Without enable_autocheckpoint or enable_checkpointing SIGTERM ends the process at once, as the system does.
    """
    self._enabled = cfg.enable_autocheckpoint and cfg.enable_checkpointing
    self._world, self._signals, self._worlds_agreed, self._asked_elsewhere = world, signals, agreed, asked
    self._log, self._emit = log, emit
    self._asked = 0  # how often all processes have asked
    self._agreed = False
    self._announced = False
    if not self._enabled:
      signals.leave_requests_to_the_system()
      return
    several = world.size > 1
    signals.reclaim(forward=several)
    if several:  # exiting alone would leave the others waiting for this process
      signals.running()

  def requested(self, step: int) -> bool:
    """Whether to save and end with the state after `step` completed steps; once true, always true.

    Every process must call it equally often, and at least once in a step: the answers are the same on all of them.
    """
    self._asked += 1
    if self._agreed or not self._enabled:
      return self._agreed
    if self._worlds_agreed is not None:
      self._agreed = self._worlds_agreed()
    elif self._world.size == 1:
      self._agreed = self._signals.noticed
    else:
      from jax.experimental import multihost_utils

      self._agreed = bool(multihost_utils.reached_preemption_sync_point(self._asked))
    if (self._signals.noticed or self._agreed) and not self._announced:
      # Not in the handler, which may have interrupted a print.
      self._announced = True
      request = self._signals.request or "SIGTERM"  # received by another process
      self._emit("preemption", step=step, signal=request)
      self._log(f"{request} received: finishing the step, saving a checkpoint and exiting.")
    return self._agreed

  def agree(self) -> None:
    """All processes know, from each other, that they must save and end now."""
    self._agreed = self._enabled

  @property
  def noticed(self) -> bool:
    """Whether this process knows that it must end. Other processes may not know yet."""
    return self._signals.noticed or self._agreed or (self._enabled and self._asked_elsewhere())
