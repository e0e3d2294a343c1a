"""Some random fault histories on the real training loop. end_to_end/elastic_histories.py runs a thousand."""

from __future__ import annotations

import pytest
from end_to_end import elastic_histories
from tests.support.seeds import few

COUNT = 9  # each share of lost slices with each mesh
FEW = (4, 6, 8)  # both meshes; histories 0 to 2 have few faults or none


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", few(FEW, range(COUNT)))
def test_a_history_loses_nothing(harness, undisturbed_run, seed):
  ((faults, fixed_mesh),) = elastic_histories.histories(seed, 1)
  history = elastic_histories.run(harness, f"history-{seed}", faults, fixed_mesh)
  assert elastic_histories.check(history, undisturbed_run, fixed_mesh) == [], faults


@pytest.mark.timeout(900)
def test_a_history_of_a_model_with_experts_loses_nothing(harness):
  keys = ("num_experts=4", "num_experts_per_tok=2", "base_moe_mlp_dim=16", "load_balance_loss_weight=0.1")
  undisturbed = elastic_histories.run(harness, "experts", "", fixed_mesh=True, keys=keys)
  ((faults, fixed_mesh),) = elastic_histories.histories(6, 1)
  assert fixed_mesh and faults
  history = elastic_histories.run(harness, "experts-6", faults, fixed_mesh, keys)
  assert elastic_histories.check(history, undisturbed, fixed_mesh) == [], faults
  assert history.of_kind("recovery")
  assert any(name.endswith("feed_forward.load") for name in history.state), list(history.state)


def test_the_check_reports_a_broken_run(harness, undisturbed_run):
  """A run on other data, with other numbers: it completes, and breaks every other rule."""
  other = harness.run("other", [*elastic_histories.KEYS, "data_shuffle_seed=1"])
  broken = elastic_histories.check(other, undisturbed_run, fixed_mesh=True)
  assert any("other examples" in line for line in broken)
  assert any("has loss" in line for line in broken)
  assert any("final state differs" in line for line in broken)
