"""services=wandb: the run in Weights & Biases, each step there once, online or offline.

wandb's own environment variables decide where the run goes (WANDB_API_KEY, WANDB_ENTITY, WANDB_BASE_URL, WANDB_MODE)
and name it (WANDB_PROJECT, default trainer; WANDB_NAME, default run_name). Without an API key the run stays offline.
Online, a process continues the run of the process before it. Offline, nobody says what an earlier process has written:
each process writes a folder `{run}/wandb/offline-run-*` with all steps so far, and `wandb sync {run}/wandb/latest-run`
uploads the whole run.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from input_pipeline import storage
from trainer.observe.log import Log
from trainer.services.background_writer import Scalars
from worlds.exit_codes import PREEMPTED

EVALUATED = "evaluation/step"  # the step of the evaluation in the same row


@dataclasses.dataclass(frozen=True)
class ServiceRun:
  name: str = ""
  id: str = ""  # the same in every process of the run; "": every process starts from step 0, as a run of its own
  config: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Service(Protocol):
  """A run of a service, begun or continued. Steps are added in order, each once."""

  last_step: int  # of the rows that it has already; 0: none
  last_evaluation: int  # the largest EVALUATED that it has already; 0: none

  def add(self, step: int, scalars: dict[str, float]) -> None:
    """Adds the row of `step`, which is above the steps of all rows so far."""

  def finish(self, exit_code: int | None) -> None:
    """Ends this process's part of the run, as Destination.close."""


class EachStepOnce:
  """A Destination that gives a service every step and every evaluation once, whatever the processes of the run do.

  A service cannot replace a row. So a step that is done again keeps its first row, in which only the order of
  floating-point sums may differ. If rows are missing before the first step of this process, because an earlier
  process was killed or the service was down, they are read from the records of the run.
  """

  def __init__(
    self, open_service: Callable[[], Service], history: Callable[[], Iterable[tuple[int, Scalars, Scalars]]]
  ) -> None:
    """history: the records of the run so far: step, numbers of the step, numbers of its evaluation (or none)."""
    self._service = open_service()
    self._history = history
    self._has_seen_a_step = False
    self._step: int | None = None  # of the row that is not added yet: an evaluation may belong to it
    self._row: dict[str, float] = {}

  def write(self, step: int, scalars: Scalars, wall: float, *, is_step: bool) -> None:
    if not is_step:
      self._evaluation(step, scalars)
      return
    if not self._has_seen_a_step:
      self._has_seen_a_step = True
      if self._service.last_step < step - 1:
        self._fill_in(step)
    self._begin_row(step, scalars)

  def flush(self) -> None:
    self._add()

  def close(self, exit_code: int | None) -> None:
    if self._row and self._step is None:  # an evaluation that no step has followed
      self._step = self._service.last_step + 1
    self._add()
    self._service.finish(exit_code)

  def _fill_in(self, step: int) -> None:
    """Adds the rows before `step` that the service lacks."""
    for earlier, scalars, evaluation in self._history():
      if self._service.last_step < earlier < step:
        self._begin_row(earlier, scalars)
        if evaluation:
          self._evaluation(earlier, evaluation)
    self._add()

  def _begin_row(self, step: int, scalars: Scalars) -> None:
    self._add()
    if step > self._service.last_step:
      self._step = step
      self._row.update(scalars)  # to an evaluation of an earlier step, if there was no row for it

  def _evaluation(self, step: int, scalars: Scalars) -> None:
    if step > self._service.last_evaluation:
      self._service.last_evaluation = step
      self._row.update(scalars)
      self._row[EVALUATED] = step

  def _add(self) -> None:
    if self._step is not None:
      self._service.add(self._step, self._row)
      self._service.last_step, self._step, self._row = self._step, None, {}


class WandbRun:
  """A Service: the run's part of this process."""

  def __init__(self, run_directory: str, run: ServiceRun, log: Log) -> None:
    """Begins or continues the run. Raises wandb's errors."""
    import wandb

    self._temporary = tempfile.mkdtemp(prefix="wandb-") if storage.is_address(run_directory) else ""
    directory = Path(self._temporary or run_directory)
    settings = wandb.Settings(console="off", silent=True)
    wandb.setup(settings)  # silent from here on: stdout has the lines of log.txt
    of_user = wandb.setup().settings  # of the environment
    mode = of_user.mode
    if mode == "online" and not wandb.login(prompt=False):
      mode = "offline"
    self._run: Any = wandb.init(
      project=of_user.project or "trainer",
      name=of_user.run_name or run.name,
      id=run.id or uuid.uuid4().hex[:12],
      resume="allow",
      mode=mode,
      dir=directory,
      config=dict(run.config),
      reinit="create_new",
      settings=settings,
    )
    self._run.define_metric("evaluation/*", step_metric=EVALUATED)
    self.last_step = self.last_evaluation = 0
    if self._run.offline:
      kept = "" if not self._temporary else "; they are lost with this machine: set WANDB_API_KEY"
      log.line(f"wandb is offline. `wandb sync {directory}/wandb/latest-run` uploads the run{kept}")
    else:
      self.last_step = self._run.starting_step - 1 if self._run.resumed else 0
      self.last_evaluation = int(self._run.summary.get(EVALUATED, 0))
      log.line(f"wandb: {self._run.url}")

  def add(self, step: int, scalars: dict[str, float]) -> None:
    self._run.log(scalars, step=step, commit=True)

  def finish(self, exit_code: int | None) -> None:
    if exit_code == PREEMPTED:
      self._run.mark_preempting()
    self._run.finish(exit_code=exit_code or 0)
    if self._temporary and not self._run.offline:  # wandb has all of it
      shutil.rmtree(self._temporary, ignore_errors=True)
