"""StateBackup: one interface for every place that a run can restore its state from."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from trainer.checkpoint.arrays.host_copy import Fetch
from trainer.world import World

PATIENCE_SECONDS = 10.0  # for storage that does not answer, if memory or a local disk has a state
Accept = Callable[[dict[str, Any]], None]
LogLine = Callable[[str], None]
Emit = Callable[..., Any]


@dataclass(frozen=True)
class RunContext:
  """What every tier needs of its run.

  world: the processes that save together. run_id: of the run's folder, checked at every save in storage; "": not
  checked. fetch: see host_copy; for devices behind a proxy. log takes a line for people, and warn a warning; emit a
  kind and fields for events.jsonl. Threads may call them.
  """

  world: World
  run_id: str = ""
  fetch: Fetch | None = None
  log: LogLine = lambda line: None
  warn: LogLine = lambda line: None
  emit: Emit = lambda kind, **fields: None


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
