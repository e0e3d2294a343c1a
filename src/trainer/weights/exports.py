"""Hugging Face folders that a run writes while it trains (hf_export_period)."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any

import jax

from input_pipeline.workers import Workers
from trainer.checkpoint import run_id
from trainer.checkpoint.errors import CheckpointError
from trainer.checkpoint.step_folders import StepFolders
from trainer.run.plugins import Opened, Plugin
from trainer.weights import export, sources
from trainer.world import SINGLE_WORLD

_TRIGGERS = frozenset({"init_done", "primary", "checkpoint_saved"})  # events after which an export may be due
_POLL_SECONDS = 0.5


class Exports(Plugin):
  """Exports the checkpoints of every hf_export_period steps, and of the last step, to {run}/hf/{step}, one at a time.

  The folders of the run tell what is due, so a process makes up what an earlier one has not finished. A process of its
  own does the work, on the CPU: it needs no device and not Python's lock, and frees its memory. Only the primary
  exports, because only it hears the events.
  """

  def open(self, run: Opened, stack: contextlib.ExitStack) -> None:
    super().open(run, stack)
    self._directory, self._period = self.config.run_directory, self.config.checkpoint.hf_export_period
    self._checkpoints = StepFolders(f"{self._directory}/checkpoints", SINGLE_WORLD, run.log.line)
    self._last = 0  # the last step of a complete run
    self._failed: set[int] = set()  # the next start of the run tries these steps again
    self._closed = False
    self._workers: Workers | None = None
    self._thread = futures.ThreadPoolExecutor(1, "hf-export")
    stack.callback(self.close)
    if self._period:
      run.events.subscribe(self._hear)

  def keeps(self, step: int) -> bool:
    """Whether the checkpoint of `step` must stay, because its export is not finished."""
    due = self._period > 0 and (step % self._period == 0 or step == self._last)
    return due and step not in self._failed and not (self._folder(step) / sources.MARKER).exists()

  def finish(self, step: int, stop: Callable[[], bool]) -> bool:
    """Waits until all exports are finished or have failed, with that of `step`, the last one. False: stop() was first.

    All processes of the world must call, and return together: the runtime of a process that ends does not wait long for
    the others.
    """
    if not self._period:
      return True
    self._last = step
    work = self._thread.submit(self._export_all) if self.run.events.directory is not None else None
    told = False
    while True:
      done = work is None or not futures.wait([work], _POLL_SECONDS).not_done
      all_done, stops = zip(*self.run.cluster.world.gather([done, stop()]))
      if all(all_done):
        return True
      if not told or any(stops):
        what = "left to the next start" if any(stops) else "awaited"
        self.run.log.line(f"The exports to {self._directory}/hf are {what}.")
        told = True
      if any(stops):
        return False

  def close(self) -> None:
    """Stops the export that is under way."""
    self._closed = True
    if (workers := self._workers) is not None:
      workers.__exit__()
    self._thread.shutdown(cancel_futures=True)

  def _hear(self, record: dict[str, Any]) -> None:
    if record.get("kind") in _TRIGGERS and not self._closed:
      self._thread.submit(self._export_all)

  def _folder(self, step: int) -> Any:
    return run_id.folder(f"{self._directory}/hf/{step}")

  def _export_all(self) -> None:
    try:
      owed = [step for step in self._checkpoints.steps() if self.keeps(step)]
    except (CheckpointError, OSError) as error:
      self.run.log.warning(f"no exports to {self._directory}/hf for now: {error}")
      return
    for step in owed:
      self._export(step)

  def _export(self, step: int) -> None:
    begin, folder = time.monotonic(), self._folder(step)
    work = functools.partial(_export_on_cpu, f"{self._directory}@{step}", str(folder))
    with Workers(1) as self._workers:
      if self._closed:
        return
      try:
        if "://" in str(folder) and folder.exists():  # of a process that was killed
          folder.rmtree()
        self._workers.call(work, f"it exports step {step}", self._report)
      except Exception as error:  # noqa: BLE001 -- no failure of an export may end the run
        if not self._closed:
          self._failed.add(step)
          self.run.log.warning(f"no export of step {step}: {error} Training goes on; the next start tries again.")
          self.run.events.emit("hf_export_failed", step=step, reason=str(error))
        return
    seconds = time.monotonic() - begin
    self.run.log.line(f"Exported step {step} to {folder} in {seconds:.1f} s.")
    self.run.events.emit("hf_exported", step=step, path=str(folder), seconds=seconds, background=True)

  def _report(self, line: str) -> None:
    if line.startswith("warning: "):
      self.run.log.line(line)


def _export_on_cpu(place: str, directory: str, report: Callable[[str], object]) -> None:
  """The work of the process."""
  jax.config.update("jax_platforms", "cpu")  # the run has the other devices
  export.export_run(place, directory, report=report)
