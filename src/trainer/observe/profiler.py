"""An xplane profile of a few steps of each attempt."""

from __future__ import annotations

import time
from collections.abc import Callable

from trainer.config.schema import ObserveSection
from trainer.observe.events import EventLog
from trainer.observe.log import Log


class Profiler:
  """Records steps [skip, skip + profiler_steps) of one attempt to {run}/profile; one object per attempt.

  An attempt may end at any moment, also inside the window: `close` then keeps what there is. A profiler that fails
  costs the profile, never the training, so its errors become warnings.
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

    `wait` returns when all work dispatched so far is done (steps run asynchronously; without it the window would hold
    other steps than it says). It is called at the window's two ends only; what it raises is the loop's own error.
    """
    if not self._running and index in self._window and not self._ended:
      wait()
      self._start()
    elif self._running and index >= self._window.stop:
      wait()
      self.close()

  def close(self) -> None:
    """Ends the attempt's profile if it is running. May be called at any time and any number of times."""
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
