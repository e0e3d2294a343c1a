"""A run of a tiny model with a receipt, which the tests of this folder check and forge."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.command import TINY

import trainer

KEYS = (
  "vocab_size=64 dataset_type=synthetic learning_rate=1e-2 steps=12 checkpoint_period=4 max_num_checkpoints_to_keep=9 "
  "receipt_state_period=2 eval_steps=0 warmup_steps_fraction=0 opt_type=adamw remat_policy=none witness_period=3"
).split()


@pytest.fixture(scope="session")
def config(compiled) -> Callable[..., trainer.Config]:
  """config(folder, key=value, ...): the configuration of a run below `folder`."""
  return lambda folder, *keys: trainer.load(*TINY, *KEYS, f"base_output_directory={folder}", *keys, compiled)


@pytest.fixture(scope="session")
def trained(config, once) -> Path:
  """The folder of the run."""
  return once("trained", lambda folder: trainer.Run(config(folder, "run_name=run")).train()) / "run"
