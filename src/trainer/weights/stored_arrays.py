"""Arrays of a checkpoint, read one by one, without a device."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from input_pipeline.places import Place
from trainer.checkpoint import run_folder, s3
from trainer.checkpoint.checkpoint_errors import Rejected
from trainer.checkpoint.step_folders import StepFolders
from trainer.config.errors import ConfigError
from trainer.world import SINGLE_WORLD


@dataclass(frozen=True)
class Entry:
  shape: tuple[int, ...]
  dtype: np.dtype
  read: Callable[[], np.ndarray]


Entries = dict[str, Entry]


def entries(place: str) -> Entries:
  """The arrays of the checkpoint that `place` names. Raises ConfigError, CheckpointError, and Rejected for a checkpoint
  that is damaged."""
  run, named = run_folder.split(os.path.expanduser(place).rstrip("/"))
  step = int(named) if named else None
  folders = StepFolders(f"{run}/checkpoints", SINGLE_WORLD, lambda line: None)
  steps = folders.steps()
  if not steps or step not in (None, *steps):
    there = f"checkpoint {step}; there are {steps}" if steps else "checkpoints"
    raise ConfigError(f"{place}: has no {there}.\nGive RUN_DIR or RUN_DIR@STEP.")
  number = steps[-1] if step is None else step
  return of_checkpoint(folders.directory / str(number), folders.verify(number))


def of_checkpoint(folder: Place, meta: dict[str, Any]) -> Entries:
  import ml_dtypes  # noqa: F401 -- numpy knows bfloat16 then

  read = lambda name: functools.partial(read_whole, folder, name)
  return {name: Entry(tuple(x["shape"]), np.dtype(x["dtype"]), read(name)) for name, x in meta["arrays"].items()}


def read_whole(folder: Place, name: str) -> np.ndarray:
  """An array of a checkpoint. Raises Rejected if it cannot be read."""
  import tensorstore

  kvstore = {"driver": "ocdbt", "base": _place(folder), "path": f"{name}/"}
  try:
    return tensorstore.open({"driver": "zarr3", "kvstore": kvstore}).result().read().result()
  except ValueError as error:  # tensorstore has no type of its own
    raise Rejected(f"{name} cannot be read: {str(error).splitlines()[0]}") from error


def _place(folder: Place) -> Any:
  """Where tensorstore finds the arrays of a checkpoint."""
  base = f"{folder}/state"
  return s3.kvstore(f"{base}/") if s3.is_s3(base) else f"{base if folder.is_remote else f'file://{base}'}/"
