"""A recovery compiles nothing that could have been prepared: for states of every size, evaluations and witnesses."""

from __future__ import annotations

import jax
import pytest
from tests.support.elastic_harness import Harness
from tests.support.seeds import few

from trainer.checkpoint.arrays import fingerprint, verified_load
from trainer.cluster.simulated import SimulatedCluster

# 75 MB of state: more than a restore holds at once.
LARGE = ("vocab_size=3072", "base_emb_dim=2048", "base_mlp_dim=8", "per_device_batch_size=1", "max_target_length=8")
PROGRAMS = ("eval_interval=2", "eval_steps=1", "witness_period=7")


def two_slices() -> SimulatedCluster:
  return SimulatedCluster({i: (jax.devices()[i],) for i in range(2)}, replacement_seconds=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("keys, batch_bytes", few([((), 1)], [(LARGE, verified_load.MIN_BATCH_BYTES), ((), 1)]))
def test_losses_and_returns_compile_nothing(tmp_path, monkeypatch, keys, batch_bytes):
  """Before, a restore compiled the fingerprints of each of its batches, the first evaluation on other slices its
  program, and the first comparison of a slice too."""
  fingerprint._program.cache_clear()
  monkeypatch.setattr(verified_load, "MIN_BATCH_BYTES", batch_bytes)
  changes = ["steps=15", "num_slices=2", "elastic_min_slice_count=1", *PROGRAMS, *keys]
  faults = "fault_injection=slice_down@5:1:prepared, slice_up@9:1"
  history = Harness(tmp_path, two_slices).run("a", [*changes, faults])
  assert [recovery["compilations"] for recovery in history.of_kind("recovery")] == [0, 0]
  (prepared,) = (event["time"] for event in history.of_kind("rehearsal_wait"))
  compiled = [(event["what"], event["background"]) for event in history.of_kind("compile") if event["time"] > prepared]
  assert compiled == [], history.of_kind("compile")
