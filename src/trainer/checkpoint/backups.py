"""Saves the state in the tiers that are due at a step, and restores the newest good state of all tiers."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
from jax import Device

from input_pipeline import storage
from trainer.checkpoint.arrays import fingerprint
from trainer.checkpoint.background import Background
from trainer.checkpoint.checkpoint_errors import CheckpointError, ConfigMismatch, NoGoodCheckpoint, Rejected, SaveFailed
from trainer.checkpoint.emergency import Emergency
from trainer.checkpoint.persistent import Persistent
from trainer.checkpoint.state_backup import PATIENCE_SECONDS, Accept, Candidate, Restored, RunContext, StateBackup
from trainer.config.schema import CheckpointSection
from trainer.observe.metrics import format_duration

_LOOK_SECONDS = 2.0  # for the list of checkpoints after the first step of an attempt, while the training waits

T = TypeVar("T")


class Backups:
  """The backups of one attempt. Every process must call every method, in the same order.

  `step` always counts completed steps. If the storage fails at a save, a warning says so, and the next save that is
  due tries again: the processes that train still hold the state. Other errors of a save are raised by the next save.
  """

  def __init__(
    self,
    cfg: CheckpointSection,
    run_directory: str,
    run: RunContext,
    slices: Mapping[int, Sequence[Device]] | None = None,
    snapshots: StateBackup | None = None,
    saves_in_storage: Callable[[], bool] = lambda: True,
  ) -> None:
    """slices: {id: devices} of the living slices (default: all devices are one). saves_in_storage: asked at every save;
    False while another world of the run does it. Raises ConfigError where the emergency tier is wanted and could not
    write."""
    self._cfg, self._run, self._saves_in_storage = cfg, run, saves_in_storage
    self._newest: tuple[int, float] | None = None  # in storage: the step, and when it was committed
    self._is_listed = False  # whether `_newest` says what is there
    self._was_writer = False  # whether this world saved in storage after the last step; an attempt looks once
    self._catch_up_due = False
    of_tier = dataclasses.replace(run, emit=self._emit_saved)
    self._persistent = Persistent(f"{run_directory}/checkpoints", cfg, of_tier)
    self._emergency: Emergency | None = None
    self._warm = Background("checkpoint-preparation")
    if cfg.enable_checkpointing and cfg.enable_emergency_checkpoint:
      self._emergency = Emergency(cfg, run_directory, slices or {0: jax.devices()}, of_tier)
    # Of equal steps the first in this list is restored: the fastest.
    tiers = (snapshots, self._emergency, self._persistent if cfg.enable_checkpointing else None)
    self._tiers: list[StateBackup] = [tier for tier in tiers if tier is not None]

  # ---- saving ----

  def due(self, step: int) -> bool:
    """Whether save(step, ...) without `last` would save, after completed(step)."""
    local = self._emergency is not None and self._due(step, self._cfg.local_checkpoint_period)
    return local or self.due_persistent(step) or self._catch_up_due

  def due_persistent(self, step: int) -> bool:
    return self._due(step, self._cfg.checkpoint_period)

  def completed(self, step: int) -> None:
    """Call this after every step. If the last save in storage that was due before `step` is missing, because the slice
    or the world that should have written it was lost, a save becomes due now.

    It looks for the missing save only after the first step of an attempt, and when this world begins to save in
    storage: at other steps the save may still be written. It also warns of a save in the background that has failed.
    """
    for tier in self._saving():
      self._call_or_warn(tier, tier.check)
    before, self._was_writer = self._was_writer, self._saves_in_storage()
    self._catch_up_due &= self._was_writer
    if before or not self._was_writer or not self._cfg.enable_checkpointing:
      return
    try:
      with storage.limited(_LOOK_SECONDS):
        self._newest, self._is_listed = self._persistent.newest(), True
    except CheckpointError:  # an outage; the next save reports this error
      return
    due = step - step % self._cfg.checkpoint_period
    self._catch_up_due = due > 0 and due != step and (self._newest or (0,))[0] < due
    if self._catch_up_due:
      self._run.log(f"The checkpoint of step {due} was not committed: saving step {step} in its place.")

  def _emit_saved(self, kind: str, **fields: Any) -> None:
    """Emits an event of the tiers, and remembers what is in storage."""
    if kind == "checkpoint_saved" and fields["tier"] == self._persistent.tier:
      self._newest, self._is_listed = (fields["step"], time.time()), True
    self._run.emit(kind, **fields)

  def _due(self, step: int, period: int) -> bool:
    return self._cfg.enable_checkpointing and step > 0 and step % period == 0

  def save(
    self,
    step: int,
    state: Any,
    meta: Mapping[str, Any],
    *,
    metric: float | None = None,
    last: bool = False,
    is_new: bool = True,
    begun: Callable[[], object] = lambda: None,
  ) -> bool:
    """Saves in the tiers whose period ends at `step`. Returns whether it saved, as soon as the state may be donated.

    meta: of meta.build; metric: evaluation loss of this state, if known. last: no step follows in this process. Then
    the persistent tier saves at any step, unless it has the step, and this method waits for the commit. If the storage
    fails, the emergency tier saves the state unless it has it, and SaveFailed is raised when that is done. is_new:
    False, with `last`, for a state that was restored or that this process has offered to all tiers: only the persistent
    tier saves it, because a second local copy would replace a good one, and moves a damaged checkpoint of `step` aside
    first. begun: called once, when what is due has begun and no commit has been awaited; for a new state also if
    nothing is due.
    """
    saved = False
    if is_new and self._emergency is not None and self._due(step, self._cfg.local_checkpoint_period):
      saved = self._save_or_warn(self._emergency, step, state, meta)
    due = self._cfg.enable_checkpointing and (last or self.due_persistent(step) or self._catch_up_due)
    if due and self._saves_in_storage():
      self._catch_up_due = False
      if not last:
        saved |= self._save_or_warn(self._persistent, step, state, meta, metric=metric)
      else:
        if not is_new and (reason := self._persistent.damage(step)):
          self._report_rejected(self._persistent, Candidate(step), reason)
          self._persistent.set_aside({str(step): reason})
        self._call_or_warn(self._persistent, self._persistent.wait)
        try:
          if stored := self._persistent.save(step, state, meta, metric=metric):
            begun()
          self._persistent.wait()
        except SaveFailed:
          if self._emergency is not None and self._emergency.newest() < step:
            self._save_or_warn(self._emergency, step, state, meta)
            self._call_or_warn(self._emergency, self._emergency.wait)
          raise
        if stored:
          return True
    if is_new:
      begun()
    return saved

  def _saving(self) -> list[Persistent | Emergency]:
    return [self._persistent] if self._emergency is None else [self._emergency, self._persistent]

  def _save_or_warn(self, tier: Persistent | Emergency, *args: Any, **options: Any) -> bool:
    """Whether the tier saves, after the save before it. A warning says if the storage failed at one of them."""
    self._call_or_warn(tier, tier.wait)
    return bool(self._call_or_warn(tier, functools.partial(tier.save, *args, **options)))

  def _call_or_warn(self, tier: StateBackup, call: Callable[[], T]) -> T | None:
    try:
      return call()
    except SaveFailed as error:
      none = "No checkpoint is in storage" if self._is_listed else "The storage cannot tell which checkpoints it has"
      good, newest = none, dict[str, float]()
      if self._newest is not None:
        newest["newest"], at = self._newest
        good = f"The newest checkpoint in storage is of step {newest['newest']}"
        if at:
          newest["newest_seconds"] = max(0.0, time.time() - at)
          good += f", from {format_duration(newest['newest_seconds'])} ago"
      self._run.warn(f"{error}. Training goes on, and the next save that is due tries again. {good}")
      self._run.emit("checkpoint_failed", tier=tier.tier, reason=str(error), **newest)
      return None

  def wait(self) -> None:
    """Returns when all saves are committed, or have failed."""
    for tier in self._saving():
      self._call_or_warn(tier, tier.wait)

  def close(self) -> None:
    """Waits for all saves and frees the threads.

    Raises errors like `wait`. While another exception is being raised, it logs its own error instead: the
    other exception is the reason why the attempt ends.
    """
    ending = sys.exception() is not None
    try:
      self._warm.wait()
      self.wait()
    except Exception as error:
      if not ending:
        raise
      self._run.log(f"The save that was under way is lost: {error}")
    finally:
      self._persistent.close()

  # ---- restoring ----

  def newest(self) -> int:
    """The newest step that this world can restore by itself; 0: none. Reads no data.

    Storage that cannot be listed counts as empty: another world may have the state, and restoring without one fails.
    """
    newest = 0
    for tier in self._tiers:
      try:
        with storage.limited(PATIENCE_SECONDS):
          steps = [tier.newest()] if isinstance(tier, Emergency) else [each.step for each in tier.candidates()]
      except CheckpointError as error:
        self._run.warn(f"{error}. The other slices may have the state")
      else:
        newest = max([newest, *steps])
    return newest

  def restore_newest(self, abstract: Any, accept: Accept = lambda meta: None, *, completed: int = 0) -> Restored | None:
    """The newest good state, with the shapes, types and shardings of `abstract`; None on a first start.

    completed: the last step that this process has completed. A snapshot of it is restored without a look at storage.

    accept(meta) may raise to refuse a good checkpoint that does not fit the run (ConfigMismatch): that ends the search.
    Damaged checkpoints in storage are moved to {run}/checkpoints_rejected once a good state is found, and what killed
    processes have left there is removed. Raises NoGoodCheckpoint if all checkpoints in storage are damaged.
    """
    if self._emergency is not None:
      self._emergency.parts(abstract)  # raises before training if no slice holds a full copy
    bad: dict[str, str] = {}  # {folder name in storage: reason}
    memory = [tier for tier in self._tiers if tier.tier == "snapshot"]
    memory = [tier for tier in memory if completed and any(c.step >= completed for c in tier.candidates())]
    restored = self._newest_good(memory, abstract, accept, bad)
    restored = restored or self._newest_good(self._tiers, abstract, accept, bad)
    if not self._cfg.enable_checkpointing or (restored is not None and restored.tier == "snapshot"):
      return restored
    damaged = bool(bad)
    try:
      unfinished = self._persistent.unfinished()
    except CheckpointError as error:
      if restored is None:
        raise
      self._run.warn(f"{error}. What is damaged or unfinished there stays")
      return restored
    for name, sealed in unfinished.items():
      bad[name] = "it was sealed and has lost its commit_success.txt" if sealed else "its save did not finish"
    if restored is None and (damaged or any(unfinished.values())):
      reasons = "".join(f"\n  {name}: {reason}" for name, reason in bad.items())
      raise NoGoodCheckpoint(
        f"{self._persistent.directory} has checkpoints and none can be restored:{reasons}\n"
        "Put a good copy of a checkpoint there. To start from step 0, move the folder away or choose another run_name"
      )
    self._persistent.set_aside(bad)
    if restored is None:
      if self._emergency is not None:
        self._emergency.mention_other_runs()
      self._warm.start(lambda: _prepare(abstract))
    else:
      self._run.emit("checkpoint_restored", step=restored.step, tier=restored.tier, path=restored.path)
    return restored

  def _newest_good(
    self, tiers: Sequence[StateBackup], abstract: Any, accept: Accept, bad: dict[str, str]
  ) -> Restored | None:
    """The newest good state of `tiers`; of equal steps, the one of the first tier in the list. None: no state.

    bad: gets {folder name: reason} of the damaged candidates in storage. A recovery from memory or a local disk does
    not need storage: CheckpointError is raised only if no other tier has a candidate. An error of the runtime says
    nothing about the state that was read: it is raised when no copy of this state could be restored.
    """
    choices: list[tuple[Candidate, StateBackup]] = []
    for tier in tiers:
      try:
        with storage.limited(PATIENCE_SECONDS) if choices else contextlib.nullcontext():
          choices += [(candidate, tier) for candidate in tier.candidates()]
      except CheckpointError as error:
        if not choices:
          raise
        self._run.log(f"The {tier.tier} backups are left out: {error}.")
    choices.sort(key=lambda choice: -choice[0].step)  # stable: keeps the order of equal steps
    unanswered: tuple[int, StateBackup, Exception] | None = None
    for i, (candidate, tier) in enumerate(choices):
      if unanswered is not None and unanswered[:2] != (candidate.step, tier):
        break
      try:
        state, meta = tier.restore(candidate, abstract, accept)
      except jax.errors.JaxRuntimeError as error:
        unanswered = candidate.step, tier, error.with_traceback(None)  # its frames hold arrays
        continue
      except CheckpointError as error:
        if all(other is tier for _, other in choices[i:]):
          raise
        self._run.log(f"The {tier.tier} backup of step {candidate.step} is left out: {error}.")
        continue
      except Rejected as reason:
        self._report_rejected(tier, candidate, str(reason))
        if tier is self._persistent:
          bad[str(candidate.step)] = str(reason)
        continue
      except ConfigMismatch as error:
        raise ConfigMismatch(f"{error}\nThe checkpoint ({tier.tier}) is {tier.path(candidate)}") from error
      return Restored(candidate.step, state, meta, tier.tier, tier.path(candidate))
    if unanswered is not None:
      raise unanswered[2]
    return None

  def _report_rejected(self, tier: StateBackup, candidate: Candidate, reason: str) -> None:
    path = tier.path(candidate)
    self._run.log(f"Checkpoint of step {candidate.step} ({tier.tier}, {path}) is not used: {reason}.")
    self._run.emit("checkpoint_rejected", step=candidate.step, tier=tier.tier, reason=reason)


def _prepare(abstract: Any) -> None:
  """Compiles the fingerprints and imports Orbax (a second each): otherwise the first save waits for both."""
  import orbax.checkpoint  # noqa: F401

  fingerprint.prepare(abstract)
