"""TensorBoard event files."""

from __future__ import annotations

import time
from typing import Any

from trainer.services.background_writer import Scalars

_FLUSH_SECONDS = 10.0  # between flushes: on an object store each one uploads the whole file


class TensorBoard:
  """Event files in a folder. A step at or before the last one starts a new file that purges the steps it replaces."""

  def __init__(self, directory: str, process: str) -> None:
    """process: in the names of the files, so that two processes never write the same one."""
    self._directory, self._process = directory, process
    self._files = 0
    self._writer: Any = None
    self._last = -1
    self._flushed = float("-inf")

  def write(self, step: int, scalars: Scalars, wall: float, *, is_step: bool) -> None:
    if self._writer is None or (is_step and step <= self._last):
      self._open_file(step if is_step else step + 1)  # an evaluation replaces no step
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.summary_pb2 import Summary

    values = [Summary.Value(tag=tag, simple_value=float(value)) for tag, value in scalars.items()]
    self._writer.write_event(Event(wall_time=wall, step=step, summary=Summary(value=values)))
    if time.monotonic() - self._flushed > _FLUSH_SECONDS:
      self.flush()
    if is_step:
      self._last = step

  def flush(self) -> None:
    self._writer.flush()
    self._flushed = time.monotonic()

  def close(self, exit_code: int | None) -> None:
    if self._writer is not None:
      self._writer.close()

  def _open_file(self, step: int) -> None:
    # Not SummaryWriter: its thread ends when the disk is full, and closing it then waits for ever.
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event, SessionLog
    from tensorboardX.record_writer import directory_check

    self.close(None)
    directory_check(self._directory)
    # tensorboardX names files by the second: without a suffix, a quick rewind would overwrite the previous file.
    self._writer = EventsWriter(f"{self._directory}/events", f".{self._files:04d}.{self._process}")
    self._files += 1
    # Tells TensorBoard to drop this step and later steps of the previous files.
    self._writer.write_event(Event(wall_time=time.time(), step=step, session_log=SessionLog(status=SessionLog.START)))
