"""Saves in the tiers that are due at a step, and restores the newest good state of all backups."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
from jax import Device

from input_pipeline import storage
from trainer.checkpoint import run_id as run_id_lib
from trainer.checkpoint.arrays import fingerprint
from trainer.checkpoint.arrays.host_copy import Fetch
from trainer.checkpoint.background import Background
from trainer.checkpoint.backup import (
  PATIENCE_SECONDS,
  Accept,
  Candidate,
  Emit,
  LogLine,
  Restored,
  StateBackup,
  restore_newest,
)
from trainer.checkpoint.emergency import Emergency
from trainer.checkpoint.errors import CheckpointError, NoGoodCheckpoint, SaveFailed
from trainer.checkpoint.persistent import Persistent
from trainer.checkpoint.snapshot import Snapshots
from trainer.config.schema import CheckpointSection
from trainer.observe.metrics import format_duration
from trainer.world import World

_LOOK_SECONDS = 2.0  # for the list of checkpoints after the first step of an attempt, while the training waits

T = TypeVar("T")
Begun = Callable[[], object]


class Tiers:
  """The backups of one attempt. Every process must call every method, in the same order.

  `step` always counts completed steps. If the storage fails at a save, a warning says so, and the next save that is
  due tries again: the processes that train still hold the state. Other errors of a save are raised by the next save.
  """

  def __init__(
    self,
    cfg: CheckpointSection,
    run_directory: str,
    *,
    world: World,
    run_id: str | None = None,
    slices: Mapping[int, Sequence[Device]] | None = None,
    snapshots: Snapshots | None = None,
    saves_in_storage: Callable[[], bool] = lambda: True,
    fetch: Fetch | None = None,
    log: LogLine = lambda line: None,
    warn: LogLine | None = None,
    emit: Emit = lambda kind, **fields: None,
  ) -> None:
    """run_id: of run_id.establish at the start of the process (default: the id is read or created now).
    slices: {id: devices} of the living slices (default: all devices are one). saves_in_storage: asked at every save;
    False while another world of the run does it. fetch: see host_copy; for devices behind a proxy. log takes a line for
    people, and warn a warning (default: log); emit a kind and fields for events.jsonl. A thread may call them. Raises
    ConfigError where the emergency tier is wanted and could not write."""
    self._cfg, self._log, self._warn, self._emit = cfg, log, warn or log, emit
    self._saves_in_storage = saves_in_storage
    self._newest: tuple[int, float] | None = None  # in storage: the step, and when it was committed
    self._is_listed = False  # whether `_newest` says what is there
    self._was_writer = False  # whether this world saved in storage after the last step; an attempt looks once
    self._catch_up_due = False
    if run_id is None:
      run_id = run_id_lib.establish(run_directory, world) if cfg.enable_checkpointing else ""
    common: dict[str, Any] = {"world": world, "run_id": run_id, "fetch": fetch, "log": log, "emit": self._emit_saved}
    self._persistent = Persistent(f"{run_directory}/checkpoints", cfg, **common)
    self._emergency: Emergency | None = None
    self._warm = Background("checkpoint-preparation")
    if cfg.enable_checkpointing and cfg.enable_emergency_checkpoint:
      slices = slices or {0: jax.devices()}
      self._emergency = Emergency(cfg, run_directory, slices, **common)
    # Of equal steps the first in this list is restored: the fastest.
    tiers = (snapshots, self._emergency, self._persistent if cfg.enable_checkpointing else None)
    self._backups: list[StateBackup] = [tier for tier in tiers if tier is not None]

  # ---- saving ----

  def due(self, step: int) -> bool:
    """Whether maybe_save(step, ...) without `last` would save, after completed(step)."""
    local = self._emergency is not None and self._due(step, self._cfg.local_checkpoint_period)
    return local or self.due_persistent(step) or self._catch_up_due

  def due_persistent(self, step: int) -> bool:
    """Whether the persistent tier saves at `step`."""
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
      self._log(f"The checkpoint of step {due} was not committed: saving step {step} in its place.")

  def _emit_saved(self, kind: str, **fields: Any) -> None:
    if kind == "checkpoint_saved" and fields["tier"] == self._persistent.tier:
      self._newest, self._is_listed = (fields["step"], time.time()), True
    self._emit(kind, **fields)

  def _due(self, step: int, period: int) -> bool:
    return self._cfg.enable_checkpointing and step > 0 and step % period == 0

  def maybe_save(
    self,
    step: int,
    state: Any,
    meta: Mapping[str, Any],
    *,
    last: bool = False,
    metric: float | None = None,
    begun: Begun = lambda: None,
  ) -> bool:
    """Saves in the tiers whose period ends at `step`, and with `last` in the persistent tier. Whether it saved.

    last: no step follows in this process: as `save_in_storage`. Otherwise returns as soon as the state may be donated.
    meta: of meta.build; metric: evaluation loss of this state, if known. begun: called once, when what is due has begun
    and no commit has been awaited; also if nothing is due.
    """
    saved = False
    if self._emergency is not None and self._due(step, self._cfg.local_checkpoint_period):
      saved = self._save_or_warn(self._emergency, step, state, meta)
    due = self._cfg.enable_checkpointing and (last or self.due_persistent(step) or self._catch_up_due)
    if due and self._saves_in_storage():
      self._catch_up_due = False
      if not last:
        saved |= self._save_or_warn(self._persistent, step, state, meta, metric=metric)
      elif self._commit(step, state, meta, metric, begun):
        return True
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
      self._warn(f"{error}. Training goes on, and the next save that is due tries again. {good}")
      self._emit("checkpoint_failed", tier=tier.tier, reason=str(error), **newest)
      return None

  def save_in_storage(
    self, step: int, state: Any, meta: Mapping[str, Any], *, metric: float | None = None, begun: Begun = lambda: None
  ) -> bool:
    """Saves in the persistent tier, unless it has a good checkpoint of `step`. Whether it saved. Waits for the commit.

    For a state that was restored, or is saved in the other tiers: a second local copy would replace a good one. If the
    storage fails, the emergency tier saves the state unless it has it, and SaveFailed is raised when that is done. A
    damaged checkpoint of `step` is moved aside first. meta, metric: see `maybe_save`. begun: called if it saves, before
    the commit.
    """
    if not self._cfg.enable_checkpointing or not self._saves_in_storage():
      return False
    if reason := self._persistent.damage(step):
      self._report_rejected(self._persistent, Candidate(step), reason)
      self._persistent.set_aside({str(step): reason})
    return self._commit(step, state, meta, metric, begun)

  def _commit(self, step: int, state: Any, meta: Mapping[str, Any], metric: float | None, begun: Begun) -> bool:
    self._call_or_warn(self._persistent, self._persistent.wait)
    try:
      saved = self._persistent.save(step, state, meta, metric=metric)
      if saved:
        begun()
      self._persistent.wait()
      return saved
    except SaveFailed:
      if self._emergency is not None and self._emergency.newest() < step:
        self._save_or_warn(self._emergency, step, state, meta)
        self._call_or_warn(self._emergency, self._emergency.wait)
      raise

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
      self._log(f"The save that was under way is lost: {error}")
    finally:
      self._persistent.close()

  # ---- restoring ----

  def newest(self) -> int:
    """The newest step that this world can restore by itself; 0: none. Reads no data.

    Storage that cannot be listed counts as empty: another world may have the state, and restoring without one fails.
    """
    newest = 0
    for backup in self._backups:
      try:
        with storage.limited(PATIENCE_SECONDS):
          steps = [backup.newest()] if isinstance(backup, Emergency) else [each.step for each in backup.candidates()]
      except CheckpointError as error:
        self._warn(f"{error}. The other slices may have the state")
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

    def rejected(backup: StateBackup, candidate: Candidate, reason: str) -> None:
      self._report_rejected(backup, candidate, reason)
      if backup is self._persistent:
        bad[str(candidate.step)] = reason

    memory = [backup for backup in self._backups if backup.tier == "snapshot"]
    memory = [backup for backup in memory if completed and any(c.step >= completed for c in backup.candidates())]
    restored = restore_newest(memory, abstract, accept, rejected, self._log)
    restored = restored or restore_newest(self._backups, abstract, accept, rejected, self._log)
    if not self._cfg.enable_checkpointing or (restored is not None and restored.tier == "snapshot"):
      return restored
    damaged = bool(bad)
    try:
      unfinished = self._persistent.unfinished()
    except CheckpointError as error:
      if restored is None:
        raise
      self._warn(f"{error}. What is damaged or unfinished there stays")
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
      self._emit("checkpoint_restored", step=restored.step, tier=restored.tier, path=restored.path)
    return restored

  def _report_rejected(self, backup: StateBackup, candidate: Candidate, reason: str) -> None:
    path = backup.path(candidate)
    self._log(f"Checkpoint of step {candidate.step} ({backup.tier}, {path}) is not used: {reason}.")
    self._emit("checkpoint_rejected", step=candidate.step, tier=backup.tier, reason=reason)


def _prepare(abstract: Any) -> None:
  """Compiles the fingerprints and imports Orbax (a second each): otherwise the first save waits for both."""
  import orbax.checkpoint  # noqa: F401

  fingerprint.prepare(abstract)
