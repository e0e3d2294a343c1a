"""An xplane profile of a few steps of each attempt."""

from __future__ import annotations

import time
from collections.abc import Callable

from trainer.config.schema import ObserveSection
from trainer.observe.events import EventLog
from trainer.observe.log import Log


class Profiler:
  """Records steps [skip, skip + profiler_steps) of one attempt to {run}/profile; one object per attempt.

  If an attempt ends inside the window, `close` keeps the profile so far. Errors of the profiler become warnings: they
  must not end the training.
  """

  def __init__(self, run_directory: str, cfg: ObserveSection, log: Log, events: EventLog) -> None:
    self._directory = f"{run_directory}/profile"
    first = cfg.skip_first_n_steps_for_profiler
    self._window = range(first, first + cfg.profiler_steps) if cfg.profiler == "xplane" else range(0)
    self._log, self._events = log, events
    self._running = False
    self._ended = False

  def before_step(self, index: int, wait: Callable[[], object] = lambda: None) -> None:
    """Call before the attempt's step number `index` (from 0) is dispatched.

    `wait` returns when all dispatched work is done. Steps run asynchronously, so without `wait` the window would hold
    other steps. It is called only at the two ends of the window; its exceptions are those of the training step.
    """
    if not self._running and index in self._window and not self._ended:
      wait()
      self._start()
    elif self._running and index >= self._window.stop:
      wait()
      self.close()

  def close(self) -> None:
    """Ends the attempt's profile if it is running. Closing twice is allowed."""
    running, self._running, self._ended = self._running, False, True
    if not running:
      return
    import jax

    began = time.monotonic()
    try:
      jax.profiler.stop_trace()
    except (RuntimeError, ValueError, OSError) as error:
      self._log.warning(f"the profile was lost: {error}")
      return
    self._events.emit("profile", seconds=time.monotonic() - began, directory=self._directory)
    self._log.line(f"profile written to {self._directory}")

  def _start(self) -> None:
    import jax

    try:
      jax.profiler.start_trace(self._directory)
    except (RuntimeError, ValueError, OSError) as error:
      self._ended = True
      self._log.warning(f"no profile of this attempt: {error}")
      return
    self._running = True
