"""The size of the ramdisk: the example of the guide, and the bytes that the tier writes."""

from __future__ import annotations

import jax
import pytest
from tests.support import toy_state

from trainer.checkpoint import ramdisk_size
from trainer.checkpoint.emergency import Emergency
from trainer.checkpoint.state_backup import RunContext
from trainer.world import SingleWorld


def test_the_guides_example():
  assert ramdisk_size.ramdisk_by_rule(70_000_000_000, 32) == pytest.approx(60.3e9, rel=0.002)


def test_exact_values_are_written(tmp_path):
  cfg = toy_state.config(
    enable_emergency_checkpoint=True, local_checkpoint_directory=str(tmp_path), local_checkpoint_period=1
  )
  slices = {0: jax.devices()[:4], 1: jax.devices()[4:]}
  tier = Emergency(cfg, "run", slices, RunContext(SingleWorld(), "0123"))
  for step in (1, 2, 3):
    tier.save(step, toy_state.state(step), {})
  tier.wait()
  exact = ramdisk_size.ramdisk_exact(toy_state.state(), slices[1], lambda device: 0)
  written = sum(path.stat().st_size for path in tmp_path.glob("run-*/*/*.s1.*.bin"))
  assert exact[0] - 2 * 64 < written <= exact[0]
