"""Who saves at this step, and what a run resumes from: the newest state that can be trusted, over all tiers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trainer.checkpoint import agree
from trainer.checkpoint.errors import NoGoodCheckpoint, Rejected
from trainer.checkpoint.persistent import Emit, Log, Persistent
from trainer.config.schema import CheckpointSection


@dataclass(frozen=True)
class Restored:
  """A state that has been verified, and where it came from."""

  step: int
  state: Any
  meta: dict[str, Any]
  tier: str
  path: str


class Tiers:
  """The checkpoint tiers of one attempt. Every process calls every method, in the same order.

  `step` always counts completed steps. Errors of a background save are raised by the next call.
  """

  def __init__(
    self,
    cfg: CheckpointSection,
    run_directory: str,
    *,
    log: Log = lambda line: None,
    emit: Emit = lambda kind, **fields: None,
  ) -> None:
    """log takes a line for people; emit a kind and fields for events.jsonl. Both may be called from a thread."""
    self._cfg, self._log, self._emit = cfg, log, emit
    self._persistent = Persistent(f"{run_directory}/checkpoints", cfg, log=log, emit=emit)

  def due(self, step: int) -> bool:
    """Whether maybe_save(step, ...) without `last` would save."""
    return self._cfg.enable_checkpointing and step > 0 and step % self._cfg.checkpoint_period == 0

  def maybe_save(
    self, step: int, state: Any, meta: Mapping[str, Any], *, last: bool = False, metric: float | None = None
  ) -> bool:
    """Saves where a period ends at `step`, or where it is the last step of this process; whether it did.

    meta: of meta.build; metric: evaluation loss of this state, if known. Returns as soon as the state may be donated.
    """
    if not self._cfg.enable_checkpointing:
      return False
    self._persistent.check()
    if not (last or self.due(step)):
      return False
    return self._persistent.save(step, state, meta, metric=metric)

  def wait(self) -> None:
    """Returns when everything that was started is committed. Raises CheckpointError where it is not."""
    self._persistent.wait()

  def close(self) -> None:
    """wait, and free the threads."""
    self._persistent.close()

  def restore_newest(
    self, abstract: Any, accept: Callable[[dict[str, Any]], None] = lambda meta: None
  ) -> Restored | None:
    """The newest state that can be trusted, in the shapes, types and shardings of `abstract`; None on a first start.

    accept(meta) may raise to refuse a checkpoint that is good but not of this run (ConfigMismatch): that ends the
    search. Damaged ones are passed over and, once a good one is found, moved to {run}/checkpoints_rejected. Raises
    NoGoodCheckpoint where there are some and all are damaged.
    """
    if not self._cfg.enable_checkpointing:
      return None
    found = agree.from_primary({"steps": self._persistent.steps(), "unfinished": self._persistent.unfinished()})
    rejected = {
      name: "it was sealed and has lost its commit_success.txt" if sealed else "its save did not finish"
      for name, sealed in found["unfinished"].items()
    }
    for step in reversed(found["steps"]):
      try:
        restored = self._attempt(step, abstract, accept)
      except Rejected as reason:
        rejected[str(step)] = str(reason)
        self._log(f"Checkpoint {self._persistent.directory / str(step)} is not used: {reason}")
        self._emit("checkpoint_rejected", step=step, tier="persistent", reason=str(reason))
        continue
      self._set_aside(rejected)
      return restored
    if found["steps"] or any(found["unfinished"].values()):
      reasons = "".join(f"\n  {name}: {reason}" for name, reason in rejected.items())
      raise NoGoodCheckpoint(
        f"{self._persistent.directory} has checkpoints and none can be restored:{reasons}\n"
        "Put a good copy of one there, or, to start again from step 0, move the folder away or choose another run_name"
      )
    self._set_aside(rejected)
    return None

  def _attempt(self, step: int, abstract: Any, accept: Callable[[dict[str, Any]], None]) -> Restored:
    path = str(self._persistent.directory / str(step))
    reasons, meta = self._verify(step)
    if any(reasons):
      raise Rejected(next(reason for reason in reasons if reason))
    self._log(f"Found commit_success file. Keeping {path}/.")
    accept(meta)
    self._log(f"Restoring checkpoint from {path}.")
    reason, state = "", None
    try:
      state = self._persistent.restore(step, abstract, meta)
    except Rejected as rejection:
      reason = str(rejection)
    if any(reasons := agree.gather(reason)):
      raise Rejected(next(reason for reason in reasons if reason))
    self._emit("checkpoint_restored", step=step, tier="persistent", path=path)
    return Restored(step, state, meta, "persistent", path)

  def _verify(self, step: int) -> tuple[list[str], dict[str, Any]]:
    """(each process's reason against the step or "", the meta): the processes share the reading of the files."""
    import jax

    reason, meta = "", {}
    try:
      meta = self._persistent.verify(step, jax.process_index(), jax.process_count())
    except Rejected as rejection:
      reason = str(rejection)
    return agree.gather(reason), meta

  def _set_aside(self, rejected: Mapping[str, str]) -> None:
    import jax

    moved = {}
    if jax.process_index() == 0:
      moved = {name: self._persistent.set_aside(name, reason) for name, reason in rejected.items()}
    for name, target in agree.from_primary(moved).items():
      self._log(f"Moved checkpoint {name} to {target}: {rejected[name]}")
