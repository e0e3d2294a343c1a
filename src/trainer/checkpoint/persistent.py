"""The persistent tier: Orbax in {run}/checkpoints/{step}, local or in a bucket, with checksums of every file and array.

A step's folder has Orbax's `state/`, our `meta.json` and `manifest.json` (see `checksums.manifest`), and the marker
`commit_success.txt`. All files are in place before Orbax commits: locally by renaming the folder, on an object store by
writing the marker last. A step without the marker is not finished.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax

from input_pipeline import storage
from trainer.checkpoint import background, retention, run_folder, s3, step_folders
from trainer.checkpoint.arrays import fingerprint, host_copy, single_replica, state_tree, verified_load
from trainer.checkpoint.background import Background
from trainer.checkpoint.checkpoint_errors import CheckpointError, NonFiniteState, Rejected, SaveFailed
from trainer.checkpoint.save_barriers import NO_TIMEOUT_SECONDS, SaveBarriers
from trainer.checkpoint.state_backup import Accept, Candidate, RunContext, committed
from trainer.checkpoint.step_folders import UNFINISHED, StepFolders
from trainer.checkpoint.together import together
from trainer.config.schema import CheckpointSection
from trainer.process import runtime_errors

_PATIENCE_SECONDS = 15.0  # for a store that does not answer while the training waits: the next save tries again


@dataclass
class _Save:
  """A save under way: what the background thread needs to seal and finish it."""

  step: int
  meta: dict[str, Any]
  started: fingerprint.Started
  clock: float
  barriers: SaveBarriers | None  # of several processes
  threads_before: list[threading.Thread]
  blocked: float = 0.0


class Persistent(StepFolders):
  """Saves and restores {directory}/{step}: the StateBackup in storage.

  At most one save is in flight; the next call raises its error.
  """

  tier = "persistent"

  def __init__(
    self,
    directory: str,
    cfg: CheckpointSection,
    run: RunContext,
    *,
    atomicity: Literal["auto", "commit_file"] = "auto",
  ) -> None:
    """atomicity="commit_file" makes a local directory behave as an object store does."""
    super().__init__(directory, run.world, run.log)
    self._run_id, self._emit, self._fetch = run.run_id, run.emit, run.fetch
    self._cfg, self._atomicity = cfg, atomicity
    self._writer: Any = None
    self._background = Background("persistent-checkpoint")
    self._save: _Save | None = None
    self._losses: dict[int, float | None] | None = None

  # ---- saving ----

  def save(self, step: int, state: Any, meta: Mapping[str, Any], *, metric: float | None = None) -> bool:
    """Starts (async_checkpointing) or completes a save of `state`, a pytree of jax.Arrays; False if the step exists.

    Returns when the state has been copied to the host: its buffers may then be donated. `meta` is JSON; `metric` is
    the evaluation loss, for checkpoint_keep_best. Raises SaveFailed for this save and for the one before it if the
    storage fails, NonFiniteState (from `wait` or the next call) if the state has infinities or NaNs, and
    CheckpointError if the run's folder is not the one of the start.
    """
    self.wait()
    begin = time.monotonic()
    exists, failed, name = self._on_primary(lambda: [*self._prepare(step), secrets.token_hex(8)])
    if failed:
      raise SaveFailed(failed)
    if exists:
      return False
    flat = state_tree.flatten(state)
    sealed_meta = dict(meta, step=step, metric=metric, arrays=state_tree.describe(flat))
    started = fingerprint.dispatch(flat)
    if self._fetch is not None and _reads_arrays():
      started = self._fetch(functools.partial(host_copy.read, flat, started), f"the copy of step {step} for its save")
    barriers = SaveBarriers(f"save/{name}", self._world.rank) if self._world.size > 1 else None
    self._save = _Save(step, sealed_meta, started, begin, barriers, threading.enumerate())
    try:
      import orbax.checkpoint as ocp

      args = ocp.args.Composite(state=ocp.args.PyTreeSave(flat))
      self._orbax_writer().save(str(self.directory / str(step)), args=args, force=True)
    except jax.errors.JaxRuntimeError:
      background.end_orbax_threads(self._save.threads_before)
      raise
    except Exception as error:
      if (failure := self._failure(step, error)) is error:
        raise  # an error must not be its own cause
      raise failure from error
    self._save.blocked = time.monotonic() - begin
    self._background.start(functools.partial(self._finish, self._save))
    if not self._cfg.async_checkpointing:
      self.wait()
    return True

  def _prepare(self, step: int) -> tuple[bool, str]:
    """(whether the step is saved already, why it cannot be saved or ""). On the primary. Makes room for the folder.

    Where Orbax itself cannot make the folder on the primary, the other processes wait for it. Raises CheckpointError
    if the run's folder is not the one of the start.
    """
    try:
      with storage.limited(_PATIENCE_SECONDS):  # the training waits
        return self._make_room(step), ""
    except OSError as error:
      return False, str(self._failed(step, error))

  def _make_room(self, step: int) -> bool:
    """As `_prepare`. Whether the step is saved already."""
    self._check_run_folder(step)
    if self._committed(str(step)) and str(step) not in self._unusable:
      return True
    self.directory.mkdir(parents=True, exist_ok=True)
    self._begin_to_write()
    for path in (self.directory / str(step), temporary := self.directory / f"{step}{UNFINISHED}"):
      if path.exists():
        step_folders.remove_folder(path)
    if not self.directory.is_remote:
      temporary.mkdir()
      temporary.rmtree()
    return False

  def _check_run_folder(self, step: int) -> None:
    if self._run_id:
      what = f"step {step} could not be saved in {self.directory}"
      run_folder.require(str(self.directory.parent), self._run_id, what)

  def wait(self) -> None:
    """Returns when the save in flight is committed. Raises SaveFailed, NonFiniteState or CheckpointError."""
    self._background.wait()

  def check(self) -> None:
    """As `wait`, but does not wait."""
    self._background.check()

  def close(self) -> None:
    """Frees Orbax's threads. Call `wait` first: an error of a save in flight is not raised here."""
    if self._writer is not None:
      with contextlib.suppress(Exception):  # wait() has raised it
        self._writer.close()
      self._writer = None
    self._writing = None

  def _orbax_writer(self) -> Any:
    if self._writer is None:
      import orbax.checkpoint as ocp
      from orbax.checkpoint.options import AtomicityMode, AtomicityOptions

      background.print_errors_once()

      def finite_barrier(*, key: str, timeout_ms: int) -> None:
        assert self._save is not None and self._save.barriers is not None
        self._prints()  # first: every process raises the same error
        self._save.barriers.wait()

      self._writer = ocp.AsyncCheckpointer(
        _handler(ocp.options.MultiprocessingOptions(), one_replica=self._fetch is not None and _reads_arrays()),
        async_options=ocp.AsyncOptions(
          timeout_secs=NO_TIMEOUT_SECONDS,
          post_finalization_callback=self._seal,
          barrier_sync_fn=finite_barrier,
          # A folder that cannot be created fails at once. In the background the failure leaves Orbax's other threads
          # waiting for minutes.
          create_directories_asynchronously=False,
        ),
        atomicity_options=AtomicityOptions(mode=AtomicityMode(self._atomicity)),
      )
    return self._writer

  def _prints(self) -> dict[str, str]:
    """{name: fingerprint} of the save in flight. Raises NonFiniteState."""
    save = self._save
    assert save is not None
    prints, bad = fingerprint.collect(save.started)
    if bad:
      raise NonFiniteState(
        f"the state of step {save.step} is not finite ({len(bad)} arrays, the first {bad[0]}): not saved. "
        "Resume from the last checkpoint with a lower learning_rate or other data"
      )
    return prints

  def _seal(self) -> None:
    """Writes meta and manifest. Orbax calls this on process 0 before the commit; an exception prevents the commit."""
    save, prints = self._save, self._prints()
    assert save is not None
    self._check_run_folder(save.step)
    for name, value in prints.items():
      save.meta["arrays"][name]["fingerprint"] = value
    root = self.directory / f"{save.step}{UNFINISHED}"
    step_folders.seal(root if root.exists() else self.directory / str(save.step), save.meta)

  def _finish(self, save: _Save) -> None:
    """In the background: waits for the commit, then deletes what retention does not keep."""
    try:
      self._writer.wait_until_finished()
      committed(self, Candidate(save.step), save.clock, save.blocked, self._emit, self._log)
      if self._world.is_primary:
        self._prune(save)
        self._end_writing(save.step, self._losses or ())
    except Exception as error:
      if (failure := self._failure(save.step, error)) is error:
        raise  # as in `save`
      raise failure from error

  def _failure(self, step: int, error: BaseException) -> BaseException:
    """The error to raise for `error`, on every process. Removes the unfinished save: it takes space."""
    save, self._save, self._writing = self._save, None, None
    if save is not None and save.barriers is not None:
      save.barriers.fail(str(self._failed(step, error)))
    if save is not None:
      background.end_orbax_threads(save.threads_before)
    with contextlib.suppress(OSError), storage.limited(_PATIENCE_SECONDS):  # report the first error
      for name in (f"{step}{UNFINISHED}", str(step)) if self._world.is_primary else ():
        path = self.directory / name
        if path.exists() and not self._committed(name):
          path.rmtree()
    if isinstance(error, CheckpointError | jax.errors.JaxRuntimeError):
      return error
    try:
      with storage.limited(_PATIENCE_SECONDS):
        self._check_run_folder(step)
    except CheckpointError as moved:  # the reason for whatever Orbax reports
      return moved
    except OSError as now:
      return self._failed(step, now)
    return self._failed(step, error)

  def _failed(self, step: int, error: BaseException) -> CheckpointError:
    if isinstance(error, CheckpointError):
      return error
    # An error of the runtime is no error of the storage: a slice may be lost.
    kind = SaveFailed if runtime_errors.find(error) is None else CheckpointError
    return kind(
      f"step {step} could not be saved in {self.directory}: {_first_line(error)}. Earlier checkpoints are untouched; "
      "check space and permissions there"
    )

  def _prune(self, save: _Save) -> None:
    """Deletes what retention does not keep. A folder that cannot be read or deleted must not fail a good save."""
    if self._losses is None:
      try:
        self._losses = {step: self._loss(step) for step in self.steps()}
      except (CheckpointError, OSError) as error:
        self._log(f"Retention deletes nothing: {error}.")
        return
    self._losses[save.step] = save.meta["metric"]
    for step in sorted(set(self._losses) - retention.kept(self._losses, self._cfg)):
      try:
        if not self._delete(str(step)):
          continue
      except OSError as error:
        self._log(f"Checkpoint {self.directory / str(step)} cannot be deleted by retention: {error}. Delete it.")
      del self._losses[step]

  # ---- reading ----

  def candidates(self) -> list[Candidate]:
    """The committed steps, newest first, after `commit_sealed`."""

    def find() -> list[int]:
      self.commit_sealed()
      return self.steps()

    return [Candidate(step) for step in reversed(self._on_primary(find))]

  def path(self, candidate: Candidate) -> str:
    return str(self.directory / str(candidate.step))

  def restore(self, candidate: Candidate, abstract: Any, accept: Accept) -> tuple[Any, dict[str, Any]]:
    """(state, meta) of a committed step. The processes share the work of verifying the files.

    Every process raises CheckpointError if the storage fails.
    """
    path = self.path(candidate)
    meta = self.verified(candidate.step)
    self._log(f"Found commit_success file. Keeping {path}/.")
    accept(meta)
    self._log(f"Restoring checkpoint from {path}.")
    return self.load(candidate.step, abstract, meta), meta

  def damage(self, step: int) -> str:
    """Returns why the committed checkpoint of `step` is not good; "" if it is good, or if there is none.

    Every process must call. The processes share the work. Every process raises CheckpointError if the storage fails.
    """
    if not self._on_primary(lambda: self._committed(str(step))):
      return ""
    try:
      self.verified(step)
    except Rejected as reason:
      return str(reason)
    return ""

  def verified(self, step: int) -> dict[str, Any]:
    """The meta of a committed step. The processes share the work, and raise Rejected or CheckpointError together."""

    return together(self._world, lambda: self.verify(step, self._world.rank, self._world.size))

  def load(self, step: int, abstract: Any, meta: Mapping[str, Any]) -> Any:
    """The state of `step` (meta: as from `verify`) with the shapes, types and shardings of `abstract`.

    Every process must call. Every process raises Rejected if the arrays are not what was saved, and CheckpointError if
    the storage fails.
    """
    read = functools.partial(self.read, step)
    if self._cfg.enable_single_replica_ckpt_restoring:
      read = functools.partial(single_replica.read, self._world, read)
    return verified_load.load(self._world, read, meta["arrays"], abstract)

  def read(self, step: int, targets: Mapping[str, Any]) -> dict[str, jax.Array]:
    """The arrays of a step for {name: ShapeDtypeStruct with sharding} in their stored shapes and types, not checked."""
    if not targets:
      return {}
    import orbax.checkpoint as ocp

    # Orbax counts processes as JAX does. Each process reads alone, as its own primary: with primary_host=None Orbax
    # warns at every read that it does not log sizes.
    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=me, active_processes={me})
    args = ocp.args.PyTreeRestore(
      item=dict(targets), restore_args=ocp.checkpoint_utils.construct_restore_args(dict(targets)), partial_restore=True
    )
    try:
      with ocp.Checkpointer(_handler(alone), multiprocessing_options=alone) as reader:
        arrays = reader.restore(str(self.directory / str(step)), args=ocp.args.Composite(state=args)).state
        return jax.block_until_ready(arrays)
    except (jax.errors.JaxRuntimeError, TypeError, AttributeError, AssertionError, MemoryError):
      raise  # the checkpoint may be good
    except Exception as error:  # Orbax reports lost data as a bare Exception
      if any(map(storage.is_outage, storage.causes(error, explicit=True))):
        raise CheckpointError(f"{self.directory / str(step)} cannot be read: {_first_line(error)}") from error
      raise Rejected(f"its arrays cannot be read: {_first_line(error)}") from error


def _reads_arrays() -> bool:
  """Whether Orbax reads arrays to save them. Pathways' own persistence has another handler: its servers write them."""
  from orbax.checkpoint import type_handlers

  return type(type_handlers.get_type_handler(jax.Array)) is type_handlers.ArrayHandler


def _handler(multiprocessing: Any, *, one_replica: bool = False) -> Any:
  """Orbax's handler for a step: zarr3 in OCDBT (few files). Compression would save 8 % and double the time.

  one_replica: saves the first replica, instead of a part of each, which Orbax would cut out on the devices.
  """
  import orbax.checkpoint as ocp
  from orbax.checkpoint import type_handlers

  s3.teach_orbax()
  options = {}
  if one_replica:
    arrays = type_handlers.ArrayHandler(use_replica_parallel=False)
    options["type_handler_registry"] = type_handlers.create_type_handler_registry((jax.Array, arrays))
  state = ocp.PyTreeCheckpointHandler(
    use_zarr3=True, use_compression=False, multiprocessing_options=multiprocessing, **options
  )
  return ocp.CompositeCheckpointHandler(state=state)


def _first_line(error: BaseException) -> str:
  """The innermost cause in one line: Orbax wraps errors in exceptions without a type."""
  *_, error = storage.causes(error, explicit=True)
  return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"[:500]
