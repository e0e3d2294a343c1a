"""The witness where one controller drives simulated slices. `end_to_end.histories flips` plays more."""

from __future__ import annotations

import pytest
from end_to_end.histories import elastic

from trainer.cluster.simulated import SimulatedCluster
from trainer.config.errors import ConfigError
from trainer.config.schema import ElasticSection
from trainer.elastic.retry import check


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_slices_with_a_wrong_state_and_wrong_sums_are_lost_and_stay_away(harness):
  """Of three slices, one gets another optimizer state; then one of the two that are left has a transient fault."""
  faults = "flip_optimizer@3:1, flip_gradient@8:2"
  keys = [*elastic.KEYS, "elastic_min_slice_count=1", "witness_period=4", f"fault_injection={faults}"]
  history = harness.run("witness", keys)
  assert history.outcome.kind == "complete"
  first, second = history.of_kind("witness")
  assert (first["outcome"], first["members"], first["round"]) == ("removed", [1], "the state before step 4")
  assert (second["outcome"], second["members"], second["round"]) == ("transient", [2], "step 8")
  assert second["agreed"] == {"2": "step 4"}, "equal states before step 8 prove nothing about sums"
  assert [event["slice"] for event in history.of_kind("slice_down")] == [[1]] and not history.of_kind("slice_up")
  compiled = [event["what"] for event in history.of_kind("compile") if "witness" in event["what"]]
  assert compiled == [f"witness on slice {slice_id}" for slice_id in range(3)]
  assert "opt_state.0.mu" in " ".join(first["arrays"]) or "opt_state.0.nu" in " ".join(first["arrays"])


def test_a_witness_of_one_slice_is_refused():
  with pytest.raises(ConfigError, match=r"witness_period=8: .* there is one slice.\nUse several slices"):
    check(SimulatedCluster({0: ("device",)}), ElasticSection(witness_period=8), 10)
