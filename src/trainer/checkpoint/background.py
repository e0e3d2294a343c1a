"""Runs one task at a time in a background thread. Its error is raised in the training thread."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
  """Call wait() before start(work). check() raises the error of the work, once."""

  def __init__(self, name: str) -> None:
    self._name = name
    self._thread: threading.Thread | None = None
    self._error: BaseException | None = None

  def start(self, work: Callable[[], None]) -> None:
    assert self._thread is None, "call wait() first: one task at a time"

    def run() -> None:
      try:
        work()
      except BaseException as error:  # noqa: BLE001 -- handed to the training thread
        self._error = error

    self._thread = threading.Thread(target=run, name=self._name, daemon=True)
    self._thread.start()

  def wait(self) -> None:
    """Waits for the work, then as `check`."""
    if self._thread is not None:
      self._thread.join()
    self.check()

  def check(self) -> None:
    if self._thread is None or self._thread.is_alive():
      return
    self._thread, error, self._error = None, self._error, None
    if error is not None:
      raise error
