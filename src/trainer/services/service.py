"""What services that track experiments have in common: each run is one run there, and each step is there once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from trainer.services.background_writer import Scalars

EVALUATED = "evaluation/step"  # the step of which the evaluation in the same row is


@dataclasses.dataclass(frozen=True)
class ServiceRun:
  """The run as a service shows it."""

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
