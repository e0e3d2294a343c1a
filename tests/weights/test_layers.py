"""Parameters with stacked layers become parameters with separate layers, and the reverse."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tests.support import toy_state

from trainer.checkpoint.arrays import state_tree
from trainer.weights import stacking

SPECS = {"w": PartitionSpec("fsdp"), "norm": PartitionSpec()}


def parameters(count: int, stacked: bool):
  """Arrays of `count` layers on a mesh; each has other numbers."""
  mesh = toy_state.mesh(2, 4)
  specs = {name: PartitionSpec(None, *spec) if stacked else spec for name, spec in SPECS.items()}
  shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
  values = {"w": np.arange(count * 64.0).reshape(count, 8, 8), "norm": -np.arange(count * 8.0).reshape(count, 8)}
  put = lambda change: {name: jax.device_put(np.float32(change(x)), shardings[name]) for name, x in values.items()}
  found = put(lambda x: x) if stacked else {str(i): put(lambda x, i=i: x[i]) for i in range(count)}
  return {
    "embedding": jax.device_put(np.ones((16, 8), np.float32), NamedSharding(mesh, PartitionSpec())),
    "layers": found,
  }


@pytest.mark.parametrize("count, given, wanted", [(1, True, False), (12, True, False), (12, False, True)])
def test_layers_are_stacked_and_separated(count, given, wanted):
  params, expected = parameters(count, given), parameters(count, wanted)
  abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), expected)
  stored = stacking.as_stored(state_tree.flatten({"params": params}), abstract)
  described = jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), stored)
  assert described == jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), params)
  found = stacking.convert(params, abstract)
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    assert x.sharding == y.sharding
    np.testing.assert_array_equal(x, y)
