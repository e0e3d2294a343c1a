"""Some random fault histories on the real training loop. `python -m end_to_end.histories elastic` plays more."""

from __future__ import annotations

import pytest
from end_to_end.histories import elastic
from tests.support.seeds import few

COUNT = 9  # each share of lost slices with each mesh
FEW = (4, 6, 8)  # both meshes; histories 0 to 2 have few faults or none


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", few(FEW, range(COUNT)))
def test_a_history_loses_nothing(harness, undisturbed_run, seed):
  faults, fixed_mesh = elastic.plan("elastic", seed)
  history = elastic.run(harness, f"history-{seed}", faults, fixed_mesh)
  assert elastic.check(history, undisturbed_run, fixed_mesh) == [], faults


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_history_of_a_model_with_experts_loses_nothing(harness):
  keys = ("num_experts=4", "num_experts_per_tok=2", "base_moe_mlp_dim=16", "load_balance_loss_weight=0.1")
  undisturbed = elastic.run(harness, "experts", "", fixed_mesh=True, keys=keys)
  faults, fixed_mesh = elastic.plan("elastic", 6)
  assert fixed_mesh and faults
  history = elastic.run(harness, "experts-6", faults, fixed_mesh, keys)
  assert elastic.check(history, undisturbed, fixed_mesh) == [], faults
  assert history.of_kind("recovery")
  assert any(name.endswith("feed_forward.load") for name in history.state), list(history.state)
