"""Sharing a shard among replicas keeps every bit of every type."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tests.support import toy_state

from trainer.checkpoint.arrays import boxes, broadcast

TYPES = ["float32", "bfloat16", "float16", "float8_e4m3fn", "int8", "uint8", "int32", "uint16", "bool"]


def every_pattern(dtype) -> np.ndarray:
  """[8, 64] numbers with random bits, including NaNs with payloads, infinities, -0.0 and subnormals."""
  if dtype == jnp.bool_:
    return np.random.default_rng(0).integers(0, 2, (8, 64)).astype(bool)
  bits = np.random.default_rng(0).integers(0, 256, (8, 64, dtype.itemsize), np.uint8)
  bits[0, 0], bits[0, 1] = 0, 255
  bits[0, 2] = [0] * (dtype.itemsize - 1) + [128]  # -0.0
  return bits.view(dtype).reshape(8, 64)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("giver", [0, 1])
def test_bits_survive(name, giver):
  values = every_pattern(jnp.dtype(name))
  mesh = toy_state.mesh(2, 4)
  for spec in (PartitionSpec("fsdp"), PartitionSpec(None, "fsdp"), PartitionSpec()):
    target = jax.ShapeDtypeStruct(values.shape, values.dtype, sharding=NamedSharding(mesh, spec))
    held = boxes.of_devices(target)
    givers = boxes.owners("x", target, list(mesh.devices[giver])).values()
    parts = {device: np.ascontiguousarray(values[tuple(slice(*side) for side in held[device])]) for device in givers}
    got = broadcast.shards(target, parts)
    assert got.sharding == target.sharding
    toy_state.assert_same_bits(got, values)


def test_scalar():
  target = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(toy_state.mesh(2, 4), PartitionSpec()))
  toy_state.assert_same_bits(broadcast.shards(target, {jax.devices()[3]: np.int32(-7)[()].reshape(())}), np.int32(-7))
