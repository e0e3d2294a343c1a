"""The fused loss and its gradients, compared with jax.grad of the plain formula."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from tests.kernels.plain_cross_entropy import plain_cross_entropy
from tests.support.seeds import few

from trainer.config.rules import AXES
from trainer.kernels import cross_entropy
from trainer.kernels.cross_entropy import linear_cross_entropy
from trainer.parallel.sharding import constrain


def inputs(b=3, t=16, d=8, v=61, dtype=jnp.float32, valid=None):
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.normal(size=(b, t, d)), dtype)
  w = jnp.asarray(rng.normal(size=(v, d)), jnp.float32)
  targets = jnp.asarray(rng.integers(0, valid or v, (b, t)), jnp.int32)
  weights = jnp.asarray(rng.integers(0, 3, (b, t)) / 2, jnp.float32)
  return x, w, targets, weights


def grads(function, arrays, **options):
  """Returns ((loss_sum, z_sum), (dx, dw)); the gradients are of loss_sum + z_sum."""
  x, w, targets, weights = arrays

  def total(x, w):
    loss, z = function(x, w, targets, weights, **options)
    return loss + z, (loss, z)

  (_, sums), got = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))(x, w)
  return sums, got


def assert_same(got, want, tolerance):
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    assert a.dtype == b.dtype
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * np.abs(b).max())


CHUNKS = [(16, 1), (16, 4), (17, 4), (18, 4), (5, 8), (7, 0)]
FEW = [(t, chunks, 50 if i % 2 else None) for i, (t, chunks) in enumerate(CHUNKS)]


@pytest.mark.parametrize("t, chunks, valid", few(FEW, [(*sizes, valid) for sizes in CHUNKS for valid in (None, 50)]))
def test_equals_the_plain_formula(t, chunks, valid):
  arrays = inputs(t=t, valid=valid)
  options = {"num_chunks": chunks, "valid_vocab": valid}
  got = grads(linear_cross_entropy, arrays, z_loss=0.1, **options)
  assert_same(got, grads(plain_cross_entropy, arrays, z_loss=0.1, valid_vocab=valid), 1e-5)
  dw = np.asarray(got[1][1])
  assert np.any(dw[:50] != 0)
  assert np.any(dw[50:] != 0) == (valid is None)  # rows beyond the valid vocabulary get no gradient


def test_bfloat16_inputs_keep_a_float32_gradient_of_the_weights():
  arrays = inputs(t=64, dtype=jnp.bfloat16)
  got = grads(linear_cross_entropy, arrays, z_loss=0.0, num_chunks=4)
  want = grads(plain_cross_entropy, arrays, z_loss=0.0)
  assert got[1][0].dtype == jnp.bfloat16 and got[1][1].dtype == jnp.float32
  np.testing.assert_allclose(got[0][0], want[0][0], rtol=1e-6)
  assert_same(got[1], want[1], 1e-2)  # dlogits are rounded to 8 bits before the matmuls


def test_never_holds_the_logits_of_the_whole_sequence():
  arrays = inputs(b=2, t=256, d=8, v=4096)
  step = lambda x, w: jax.grad(lambda *a: linear_cross_entropy(*a, *arrays[2:], z_loss=0.0, num_chunks=16)[0], (0, 1))(
    x, w
  )
  memory = jax.jit(step).lower(*arrays[:2]).compile().memory_analysis()
  assert memory.temp_size_in_bytes < 2 * 256 * 4096 * 4 / 4


def test_devices_split_the_vocabulary_over_fsdp_and_tensor(monkeypatch):
  seen = set()

  def recorded(array, *axes):
    seen.add(axes)
    return constrain(array, *axes)

  monkeypatch.setattr(cross_entropy, "constrain", recorded)
  mesh = Mesh(np.array(jax.devices()).reshape(1, 4, 2, 1), AXES, axis_types=(AxisType.Auto,) * 4)
  arrays = inputs(b=4, v=64)
  with jax.set_mesh(mesh):
    placed = jax.device_put(arrays[0], NamedSharding(mesh, PartitionSpec("fsdp")))
    got = grads(linear_cross_entropy, (placed, *arrays[1:]), z_loss=0.1, num_chunks=4, vocab_shards=8)
  assert got[1][1].sharding.spec[0] == ("fsdp", "tensor")
  assert_same(got, grads(plain_cross_entropy, arrays, z_loss=0.1), 1e-5)
  assert seen == {
    ("vocab", "embed"),
    ("embed", "vocab"),
    ("loss_batch", "length", "embed"),
    ("loss_batch", "length", "vocab"),
    ("batch", "length", "embed"),
  }


def test_chunks_of_a_sharded_length_stay_where_they_are():
  mesh = Mesh(np.array(jax.devices()).reshape(1, 1, 1, 8), AXES, axis_types=(AxisType.Auto,) * 4)
  arrays = inputs(t=64, v=64)
  placed = jax.device_put(arrays[0], NamedSharding(mesh, PartitionSpec(None, "context")))

  def step(x, w):
    loss = lambda *a: linear_cross_entropy(*a, *arrays[2:], z_loss=0.0, num_chunks=4)[0]
    return jax.grad(loss)(x, w)

  with jax.set_mesh(mesh):
    compiled = jax.jit(step).lower(placed, arrays[1]).compile()
  assert "all-gather" not in compiled.as_text() and "all-to-all" not in compiled.as_text()
  assert compiled.output_shardings.spec[1] == "context"
