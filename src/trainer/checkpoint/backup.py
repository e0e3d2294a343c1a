"""StateBackup: one interface for every place that a run can restore its state from, and the search for the newest."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from input_pipeline import storage
from trainer.checkpoint.errors import CheckpointError, ConfigMismatch, Rejected

PATIENCE_SECONDS = 10.0  # for storage that does not answer, if memory or a local disk has a state
Accept = Callable[[dict[str, Any]], None]
LogLine = Callable[[str], None]
Emit = Callable[..., Any]


@dataclass(frozen=True)
class Candidate:
  """A state that a backup may be able to restore. `copy` distinguishes candidates of the same step."""

  step: int
  copy: str = ""


@dataclass(frozen=True)
class Restored:
  """A verified state, and where it came from: tier is "snapshot", "emergency" or "persistent"."""

  step: int
  state: Any
  meta: dict[str, Any]
  tier: str
  path: str


class StateBackup(Protocol):
  """Copies of the training state: in host memory (snapshot), on local disks (emergency) or in storage (persistent).

  Every process calls every method, in the same order.
  """

  tier: str

  def save(self, step: int, state: Any, meta: Mapping[str, Any]) -> bool:
    """Starts a backup of `state` after `step` completed steps; the caller may donate the state afterwards.

    Returns False if no backup was started.
    """
    ...

  def candidates(self) -> list[Candidate]:
    """What can probably be restored, best first, the same list on every process. The data is not read yet."""
    ...

  def restore(self, candidate: Candidate, abstract: Any, accept: Accept) -> tuple[Any, dict[str, Any]]:
    """(state with the shapes, types and shardings of `abstract`, meta).

    accept(meta) is called before the arrays are read; what it raises ends the search. Raises Rejected, on every process
    alike, if the candidate is damaged.
    """
    ...

  def path(self, candidate: Candidate) -> str:
    """Where the candidate lies, for messages."""
    ...


def committed(
  backup: StateBackup, candidate: Candidate, begin: float, blocking_seconds: float, emit: Emit, log: LogLine
) -> None:
  """Records that the save of `candidate`, which began at `begin` (time.monotonic()), is committed now."""
  step, tier, seconds = candidate.step, backup.tier, time.monotonic() - begin
  emit("checkpoint_saved", step=step, tier=tier, path=backup.path(candidate), blocking_seconds=blocking_seconds,
       seconds=seconds)  # fmt: skip
  log(f"Saved checkpoint {step} in {seconds:.1f} s ({tier}).")


def restore_newest(
  backups: Sequence[StateBackup],
  abstract: Any,
  accept: Accept,
  rejected: Callable[[StateBackup, Candidate, str], None],
  log: LogLine = lambda line: None,
) -> Restored | None:
  """The newest good state of all backups; of equal steps, the one of the first backup in the list. None: no state.

  rejected(backup, candidate, reason) is called for every damaged candidate on the way. A recovery from memory or a
  local disk does not need storage: CheckpointError is raised only if no other backup has a candidate. An error of the
  runtime says nothing about the state that was read: it is raised when no copy of this state could be restored.
  """
  choices: list[tuple[Candidate, StateBackup]] = []
  for backup in backups:
    try:
      with storage.limited(PATIENCE_SECONDS) if choices else contextlib.nullcontext():
        choices += [(candidate, backup) for candidate in backup.candidates()]
    except CheckpointError as error:
      if not choices:
        raise
      log(f"The {backup.tier} backups are left out: {error}.")
  choices.sort(key=lambda choice: -choice[0].step)  # stable: keeps the order of equal steps
  unanswered: tuple[int, StateBackup, Exception] | None = None
  for i, (candidate, backup) in enumerate(choices):
    if unanswered is not None and unanswered[:2] != (candidate.step, backup):
      break
    try:
      state, meta = backup.restore(candidate, abstract, accept)
    except jax.errors.JaxRuntimeError as error:
      unanswered = candidate.step, backup, error.with_traceback(None)  # its frames hold arrays
      continue
    except CheckpointError as error:
      if all(other is backup for _, other in choices[i:]):
        raise
      log(f"The {backup.tier} backup of step {candidate.step} is left out: {error}.")
      continue
    except Rejected as reason:
      rejected(backup, candidate, str(reason))
      continue
    except ConfigMismatch as error:
      raise ConfigMismatch(f"{error}\nThe checkpoint ({backup.tier}) is {backup.path(candidate)}") from error
    return Restored(candidate.step, state, meta, backup.tier, backup.path(candidate))
  if unanswered is not None:
    raise unanswered[2]
  return None
