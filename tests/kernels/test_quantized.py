"""8-bit projections, compared with qwix's own quantized training and with the rounding error that 8 bits allow."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from trainer.kernels import projection, quantized

# Bounds (least, most) on the relative error of a matmul. An int8 step is 1/127 of the row's largest value. e4m3 rounds
# a value by at most 1/16 of itself, e5m2 by at most 1/8.
ERROR = {"int8": (0.002, 0.03), "fp8": (0.01, 0.12), "fp8_full": (0.01, 0.25)}


def inputs(dtype=jnp.float32):
  keys = jax.random.split(jax.random.key(0), 3)
  x = jax.random.normal(keys[0], (3, 5, 4, 16), dtype)
  w = 0.1 * jax.random.normal(keys[1], (4, 16, 24), dtype)
  return x, w, jax.random.normal(keys[2], (3, 5, 24), dtype)


@functools.partial(jax.jit, static_argnums=0)
def run(project, x, w, g):
  out, vjp = jax.vjp(lambda x, w: project(x, w, ("heads", "head_dim", "embed"), 2), x, w)
  return out, *vjp(g)


@pytest.mark.parametrize("mode", quantized.MODES)
def test_the_error_is_the_rounding_error_of_eight_bits(mode):
  x, w, g = inputs()
  got = run(projection.choose("cpu", mode), x, w, g)
  exact = run(projection.PLAIN, x, w, g)
  for a, b in zip(got, exact, strict=True):
    assert a.shape == b.shape and a.dtype == b.dtype
    least, most = ERROR[mode]
    assert least < np.linalg.norm(a - b) / np.linalg.norm(b) < most


@pytest.mark.parametrize("mode", quantized.MODES)
def test_equals_quantized_training_by_qwix(mode):
  x, w, g = inputs()
  x, w = x.reshape(15, 64), w.reshape(64, 24)
  kind, gradient = quantized.MODES[mode]
  linear = nnx.Linear(64, 24, use_bias=False, rngs=nnx.Rngs(0))
  linear.kernel.set_value(w)
  rule = qwix.QtRule(
    weight_qtype=kind,
    act_qtype=kind,
    bwd_qtype=gradient,
    additional_qt_config={"use_original_residuals": True, "dlhs_residual_qtype": kind, "drhs_residual_qtype": kind},
  )
  with jax.numpy_dtype_promotion("standard"):  # qwix multiplies integers by float scales
    model = qwix.quantize_model(linear, qwix.QtProvider([rule]), x)
    graphdef, state = nnx.split(model)
    out, vjp = jax.vjp(lambda state, x: nnx.merge(graphdef, state)(x), state, x)
    dstate, dx = vjp(g.reshape(15, 24))
  got = jax.vjp(lambda x, w: quantized.project(x, w, 1, mode), x, w)
  want = (out, dx, dstate["kernel"][...])
  for a, b in zip((got[0], *got[1](g.reshape(15, 24))), want, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())


def test_int8_products_are_summed_in_int32():
  x, w, g = inputs(jnp.bfloat16)
  project = projection.choose("tpu", "int8")
  text = jax.jit(lambda x, w, g: run(project, x, w, g)).lower(x, w, g).as_text()
  dots = [line for line in text.splitlines() if "dot_general" in line]
  assert len(dots) == 3 and all("xi8>" in dot and "-> tensor<" in dot and "xi32>" in dot for dot in dots), dots


def test_sharded_and_unsharded_int8_are_bit_identical():
  """Integer sums and maxima do not depend on their order, and a scale belongs to a whole row.

  All values are positive: qwix scales the largest magnitude of a row to 127.5, which saturates, but -127.5 is a tie.
  """
  mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
  keys = jax.random.split(jax.random.key(0), 3)
  shapes, specs = ((8, 6, 16), (16, 24), (8, 6, 24)), (("fsdp",), ("fsdp", "tensor"), ("fsdp", None, "tensor"))
  arrays = [jax.random.uniform(key, shape) for key, shape in zip(keys, shapes, strict=True)]
  placed = [
    jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec))) for array, spec in zip(arrays, specs, strict=True)
  ]

  @jax.jit
  def step(x, w, g):
    out, vjp = jax.vjp(lambda x, w: quantized.project(x, w, 1, "int8"), x, w)
    return out, *vjp(g)

  for a, b in zip(step(*placed), step(*arrays), strict=True):
    np.testing.assert_array_equal(a, b)
