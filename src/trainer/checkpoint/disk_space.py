"""What the checkpoints of a run will need on local disks, compared with what is free. Object stores have no limit."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from trainer.checkpoint.arrays import state_tree
from trainer.checkpoint.ramdisk_size import ramdisk_exact
from trainer.config.schema import Config
from trainer.observe import files


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
  if in_storage and not files.is_object_store(folder):
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


def _shortage(folder: Path, needed: int, what: str, remedy: str) -> Iterator[str]:
  """needed: bytes, with those that files below `folder` have already."""
  folder = folder.expanduser().absolute()
  usage = shutil.disk_usage(next(parent for parent in (folder, *folder.parents) if parent.exists()))
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
