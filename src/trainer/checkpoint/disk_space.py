"""What the checkpoints of a run will need of local disks: space, compared with what is free, and locks.

Object stores have no limit."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from input_pipeline import storage
from input_pipeline.locks import UNSUPPORTED, locked
from trainer.checkpoint.arrays import state_tree
from trainer.checkpoint.ramdisk_size import ramdisk_exact
from trainer.config.errors import ConfigError
from trainer.config.schema import Config


def warnings(
  config: Config, state: Any, *, in_storage: bool, copied: Mapping[int, Sequence[jax.Device]]
) -> Iterator[str]:
  """A line for each folder that has less space than the run will need there.

  state: abstract, of one slice. in_storage: whether this process saves in the run's folder. copied: {id: devices} of
  the slices whose hosts write local copies.
  """
  cfg, steps = config.checkpoint, config.run.steps
  if not cfg.enable_checkpointing:
    return
  folder = f"{config.run_directory}/checkpoints"
  if in_storage and not storage.is_address(folder):
    # The oldest checkpoint is deleted when the newest is committed.
    count = cfg.max_num_checkpoints_to_keep + cfg.checkpoint_keep_best + 1
    if cfg.checkpoint_keep_period:
      count += steps // math.lcm(cfg.checkpoint_period, cfg.checkpoint_keep_period)
    count, size = min(count, math.ceil(steps / cfg.checkpoint_period)), state_tree.state_bytes(state)
    yield from _shortage(
      Path(folder), count * size, f"{count:,} x {_gb(size)}", "keep fewer checkpoints (max_num_checkpoints_to_keep)"
    )
  if cfg.enable_emergency_checkpoint:
    here = jax.process_index()
    host_of = lambda device: device.process_index
    mine = [ramdisk_exact(state, devices, host_of).get(here, 0) for devices in copied.values()]
    folder = cfg.local_checkpoint_directory
    yield from _shortage(Path(folder), sum(mine), "local copies of the state", "give the ramdisk more memory")


def require_locks(config: Config) -> None:
  """Raises ConfigError if no checkpoint can be saved in the run's folder, because Orbax locks its files there."""
  run_directory = config.run_directory
  if not config.checkpoint.enable_checkpointing or storage.is_address(run_directory):
    return
  import fcntl

  folder = _existing(Path(run_directory))
  try:
    with tempfile.TemporaryFile(dir=folder) as file:
      if locked(file.fileno(), shared=False) is not None:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
  except OSError as error:
    if error.errno not in UNSUPPORTED:  # full, or not writable: the first save says so
      return
  import tensorstore  # Orbax's library decides: it tries several kinds of locks

  with tempfile.TemporaryDirectory(dir=folder) as place:
    try:
      tensorstore.KvStore.open({"driver": "file", "path": f"{place}/"}).result().write("x", b"").result()
    except ValueError:
      raise ConfigError(
        f"no checkpoint can be saved in {run_directory}: Orbax locks its files (fcntl, flock), and the file system of "
        f"{folder} has no locks. Mount it with locks, choose a base_output_directory elsewhere, or set "
        "enable_checkpointing=false"
      ) from None


def _existing(folder: Path) -> Path:
  """The folder, or the nearest one above it that exists."""
  folder = folder.expanduser().absolute()
  return next(parent for parent in (folder, *folder.parents) if parent.exists())


def _shortage(folder: Path, needed: int, what: str, remedy: str) -> Iterator[str]:
  """needed: bytes, with those that files below `folder` have already."""
  folder = folder.expanduser().absolute()
  usage = shutil.disk_usage(_existing(folder))
  if not usage.total or needed <= usage.free:  # total: 0 where the file system does not tell
    return
  present = 0
  for parent, _, names in os.walk(folder):
    for name in names:
      with contextlib.suppress(OSError):  # another process may have deleted it
        present += os.stat(os.path.join(parent, name)).st_size
  if needed - present > usage.free:
    yield (
      f"{folder} will need {_gb(needed)} ({what}), and {_gb(usage.free + present)} are there. A save will fail. Free "
      f"space, or {remedy}"
    )


def _gb(count: int) -> str:
  return f"{count / 1e9:.3g} GB"
