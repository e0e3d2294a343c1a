"""What the analysis derives from a mesh, without compiling anything."""

from __future__ import annotations

import jax
import pytest

from trainer.config.schema import ParallelismSection
from trainer.parallel import mesh
from trainer.preflight import analysis


@pytest.mark.parametrize(
  "keys, expected", [({}, [0, 0, 0, 0, 1, 1, 1, 1]), ({"dcn_fsdp_parallelism": 2}, [0, 0, 0, 0, 1, 1, 1, 1])]
)
def test_partitions_follow_the_mesh_on_devices_without_a_slice_index(keys, expected):
  """An axis of the mesh other than the outermost one may cross slices."""
  devices = jax.devices()[:8]
  slices = [devices[:4], devices[4:]]
  made = mesh.make(ParallelismSection(**keys), slices)
  assert analysis.slice_of(made, slices) == expected
