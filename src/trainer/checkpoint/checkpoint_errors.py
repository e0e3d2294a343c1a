"""The errors of checkpoints, and what each means for the run."""

from __future__ import annotations


class CheckpointError(RuntimeError):
  """A checkpoint could not be written or read: storage, space, permissions. Progress may not be saved."""


class NonFiniteState(CheckpointError):
  """The state to be saved has infinities or NaNs; it was not committed."""


class SaveFailed(CheckpointError):
  """The storage failed at a save. The state is good, and so are the saves before: training may go on, and save later.

  Every process of the world raises it for the same save."""


class NoGoodCheckpoint(CheckpointError):
  """There are checkpoints and all are damaged. Starting from step 0 without an error would hide the loss."""


class ConfigMismatch(ValueError):
  """A key that changes the model or the order of data differs from the checkpoint's."""


class Rejected(Exception):
  """The reason why one checkpoint cannot be used. Never leaves the package: the next older one is tried."""
