"""Parts of stored arrays: their values, their fingerprint, and how many bytes are read."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from input_pipeline.places import Place
from trainer.checkpoint.arrays.fingerprint import Blocks
from trainer.checkpoint.errors import Rejected
from trainer.checkpoint.persistent import Persistent
from trainer.config.schema import CheckpointSection
from trainer.weights.array_parts import ArrayParts
from trainer.world import SINGLE_WORLD


@pytest.mark.parametrize("spec", [(), (None, None, "a", "b"), ("a", "b"), (None, "a", "b")], ids=str)
def test_parts_of_a_stored_array(tmp_path, monkeypatch, spec):
  mesh = jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,) * 2)
  values = np.random.default_rng(0).standard_normal((4, 6, 8, 10)).astype(jnp.bfloat16)
  values[0] = 0  # a chunk of zeros is not stored
  array = jax.device_put(values, jax.sharding.NamedSharding(mesh, jax.P(*spec)))
  persistent = Persistent(str(tmp_path), CheckpointSection(async_checkpointing=False), world=SINGLE_WORLD)
  persistent.save(1, {"params": {"w": array}}, {})
  expected = persistent.verified(1)["arrays"]["params.w"]["fingerprint"]
  persistent.close()
  monkeypatch.setattr("trainer.weights.array_parts.BLOCK", 100)  # rows come in several reads
  read, get = [], ArrayParts._get
  monkeypatch.setattr(ArrayParts, "_get", lambda *args: read.append(get(*args)) or read[-1])
  parts, found = ArrayParts(Place(str(tmp_path / "1"))), Blocks()
  for i in range(4):
    for j in range(6):
      out = parts.read("params.w", (i, j), np.empty((8, 10), jnp.bfloat16), found)
      np.testing.assert_array_equal(out, values[i, j])
  assert found.value == expected and found.is_finite
  assert sum(map(len, read[1:])) <= values.nbytes  # the first is the description of the array
  with pytest.raises(Rejected, match="has no array"):
    parts.read("params.x", (), np.empty(1, jnp.bfloat16), Blocks())
