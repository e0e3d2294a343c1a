"""Ray's workers as members and lanes, and the environment of a slice, without Ray."""

from __future__ import annotations

import pytest

from trainer import cluster
from trainer.launch.ray.ray_slices import RaySlot, RayWorker, environment, slots
from worlds.place import Place

PLACE = Place(("10.0.0.9:4000",), b"t" * 32, member=1, lane=1, lanes=2, slice_coordinator="10.0.0.3:5000")


def workers(*slice_names: str) -> list[RayWorker]:
  return [RayWorker(rank, f"10.0.0.{rank}", 5000 + rank, name) for rank, name in enumerate(slice_names)]


@pytest.mark.parametrize("names", [("a", "a", "b", "b"), ("", "", "", "")])
def test_workers_of_a_slice_are_its_lanes(names):
  assert slots(workers(*names), lanes=2) == {0: RaySlot(0, 0), 1: RaySlot(0, 1), 2: RaySlot(1, 0), 3: RaySlot(1, 1)}


def test_ranks_that_alternate_between_slices_are_grouped_by_slice():
  """Ray's ranks follow its nodes, not its slices, if a slice was replaced."""
  assert slots(workers("a", "b", "a", "b"), lanes=2) == {
    0: RaySlot(0, 0),
    2: RaySlot(0, 1),
    1: RaySlot(1, 0),
    3: RaySlot(1, 1),
  }


@pytest.mark.parametrize("names", [("a", "a", "b"), ("a", "b", "b", "b")])
def test_parts_of_slices_are_refused(names):
  with pytest.raises(ValueError, match="a slice has 2 workers"):
    slots(workers(*names), lanes=2)


def test_a_slice_sees_only_itself(monkeypatch):
  """A pod that replaces a lost one has the old number of slices in its environment, and libtpu would wait for them."""
  changes = environment(PLACE, ["10.0.0.3", "10.0.0.4"], tpu=True)
  stale = {"MEGASCALE_NUM_SLICES": "3", "MEGASCALE_COORDINATOR_ADDRESS": "gone:8081", "TPU_WORKER_ID": "7"}
  for name in changes:
    monkeypatch.setenv(name, stale.get(name, "stale"))  # and as before after the test
  cluster.change_environment(changes)
  after = cluster.inherited_environment()
  assert not [name for name in after if name.startswith("MEGASCALE_")]
  assert (after["TPU_WORKER_ID"], after["TPU_WORKER_HOSTNAMES"]) == ("1", "10.0.0.3,10.0.0.4")
  assert Place.read(after) == PLACE
