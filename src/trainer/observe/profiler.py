"""An xplane profile of a few steps of each attempt."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from input_pipeline import storage
from trainer.config.schema import ObserveSection
from trainer.observe.events import EventLog
from trainer.observe.log import Log

_LONGEST_END_SECONDS = 60.0  # that the end of an attempt waits for a tracer, perhaps of a slice that hangs


class Profiler:
  """Records steps [skip, skip + profiler_steps) of one attempt to {run}/profile, or the rounds of local steps that
  begin there, at least the first one after `skip` steps; one object per attempt.

  Each attempt of each process has its own folder there. If an attempt ends inside the window, `close` keeps the
  profile so far, and the next attempt records a window of its own. Errors of the profiler become warnings: they must
  not end the training.
  """

  def __init__(self, run_directory: str, cfg: ObserveSection, log: Log, events: EventLog) -> None:
    self._directory = f"{run_directory}/profile/{events.process}-{events.attempt}"
    first = cfg.skip_first_n_steps_for_profiler
    self._window = range(first, first + cfg.profiler_steps) if cfg.profiler == "xplane" else range(0)
    self._log, self._events = log, events
    self._stop: Callable[[], object] | None = None  # while the tracer runs
    self._ended = False

  def before_step(self, index: int, wait: Callable[[], object] = lambda: None) -> None:
    """Call before the attempt's step number `index` (from 0), or the round that begins with it, is dispatched.

    `wait` returns when all dispatched work is done. Steps run asynchronously, so without `wait` the window would hold
    other steps. It is called only at the two ends of the window; it raises what the training step raises.
    """
    if self._window and self._window.start <= index and self._stop is None and not self._ended:
      wait()
      self._start()
    elif self._stop is not None and index >= self._window.stop:
      wait()
      self.close()

  def close(self) -> None:
    """Ends the attempt's profile if it is running. Closing twice is allowed."""
    stop, self._stop, self._ended = self._stop, None, True
    if stop is None:
      return
    began = time.monotonic()
    errors: list[Exception] = []

    def end() -> None:
      try:
        stop()
      except (RuntimeError, ValueError, OSError) as error:
        errors.append(error)

    # In a thread: Pathways asks every slice for its part, and a slice may hang.
    stopping = threading.Thread(target=end, name="profiler", daemon=True)
    stopping.start()
    stopping.join(_LONGEST_END_SECONDS)
    if stopping.is_alive():
      errors.append(TimeoutError(f"the tracer did not end within {_LONGEST_END_SECONDS:g} s"))
    if errors:
      self._log.warning(f"the profile was lost: {errors[0]}")
      return
    self._events.emit("profile", seconds=time.monotonic() - began, directory=self._directory)
    self._log.line(f"profile written to {self._directory}")

  def _start(self) -> None:
    start, stop = tracer_for(self._directory)
    try:
      start(self._directory)
    except (RuntimeError, ValueError, OSError) as error:
      self._ended = True
      self._log.warning(f"no profile of this attempt: {error}")
      return
    self._stop = stop


def tracer_for(directory: str) -> tuple[Callable[[str], object], Callable[[], object]]:
  """The functions that start a profile to `directory`, and stop it.

  Behind Pathways, pathwaysutils has replaced JAX's functions by functions that record on Pathways' servers. These can
  only write to gs://. For another folder, JAX's own functions record this process, the controller.
  """
  import jax
  from pathwaysutils import profiling

  if storage.is_address(directory):
    return jax.profiler.start_trace, jax.profiler.stop_trace
  return profiling._original_start_trace, profiling._original_stop_trace
