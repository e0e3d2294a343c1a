"""The persistent checkpoints to keep, a pure function of their steps and evaluation losses."""

from __future__ import annotations

import math
from collections.abc import Mapping

from trainer.config.schema import CheckpointSection


def kept(losses: Mapping[int, float | None], cfg: CheckpointSection) -> set[int]:
  """The steps to keep of those in `losses` ({step: evaluation loss or None}).

  The newest max_num_checkpoints_to_keep, every multiple of checkpoint_keep_period, and the checkpoint_keep_best of
  lowest loss (the older one of two equals; NaN is no loss).
  """
  steps = sorted(losses)
  keep = set(steps[-cfg.max_num_checkpoints_to_keep :])
  if cfg.checkpoint_keep_period:
    keep.update(step for step in steps if step % cfg.checkpoint_keep_period == 0)
  measured = [(loss, step) for step, loss in losses.items() if loss is not None and not math.isnan(loss)]
  keep.update(step for _, step in sorted(measured)[: cfg.checkpoint_keep_best])
  return keep
