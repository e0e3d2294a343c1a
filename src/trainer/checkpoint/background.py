"""Runs one task at a time in a background thread. Its error is raised in the training thread, and only there."""

from __future__ import annotations

import io
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Collection
from typing import Any

_LIBRARIES = ("asyncio", "gcsfs", "s3fs")  # loggers


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


def print_errors_once() -> None:
  """Hides what Orbax and its libraries print of a save that fails, a traceback for each array: it is raised too."""
  for library in ("absl", *_LIBRARIES):
    logging.getLogger(library).addFilter(_is_not_repeated)
  if not isinstance(sys.unraisablehook, _WithoutClosedLoops):
    sys.unraisablehook = _WithoutClosedLoops()
    warnings.filterwarnings("ignore", "coroutine '.*' was never awaited", RuntimeWarning)  # by a thread that has ended


def end_orbax_threads(before: Collection[threading.Thread]) -> None:
  """To be called when a save has failed: ends Orbax's threads that wait for a part of it that will never be done. They
  would keep its arrays in memory, and the process from its end, for minutes. before: the threads that lived before the
  save. They stay: a program that uses the library may save with Orbax too."""
  from orbax.checkpoint._src.futures import future  # there is no public way

  for thread in threading.enumerate():
    if isinstance(thread, future._SignalingThread) and thread not in before:
      thread.cancel()
      future.set_signals(thread._receive_signals, operation_id=thread._operation_id)


def _is_not_repeated(record: logging.LogRecord) -> bool:
  return record.levelno < logging.WARNING or not (record.name in _LIBRARIES or "orbax" in record.pathname)


class _WithoutClosedLoops:
  """sys.unraisablehook without the errors of writes that end after their save has failed: tensorstore calls the event
  loop of the save, which is closed by then, and the buffer of an upload that was cut off is freed while it is read."""

  def __init__(self) -> None:
    self._before = sys.unraisablehook

  def __call__(self, unraisable: Any) -> None:
    kind, trace = unraisable.exc_type, unraisable.exc_traceback
    if kind is RuntimeError and trace is not None and trace.tb_frame.f_code.co_name == "call_soon_threadsafe":
      return  # nothing of Python has called this frame
    if kind is BufferError and isinstance(unraisable.object, io.BytesIO):
      return
    self._before(unraisable)
