"""Grouped matmuls and their derivatives against a loop over rows in float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.megablox import gmm
from tests.support.seeds import few

from trainer.kernels import grouped_matmul, grouped_matmul_gpu

SIZES = {
  "uneven": [13, 0, 40, 1, 46],
  "all rows in one group": [0, 0, 100, 0, 0],
  "the first group and the last": [60, 0, 0, 0, 40],
  "one row": [0, 0, 0, 1, 0],
}
# The kernels for GPUs are interpreted. In 16 bits they ran on an H200 (docs/benchmarks/accelerator.md).
PRODUCTS = {
  "tiles": (grouped_matmul.tile_times_weights, grouped_matmul.tile_times_rows),
  "blocks": (
    functools.partial(grouped_matmul_gpu.times_weights, interpret=True),
    functools.partial(grouped_matmul_gpu.times_rows, interpret=True),
  ),
}
FUNCTIONS = {name: grouped_matmul.differentiable(*PRODUCTS[name]) for name in PRODUCTS}


@functools.cache
def with_derivatives(function):
  """Compiled once for all groups of the same number of rows."""

  def run(x, w, sizes, g):
    out, derivative = jax.vjp(lambda x, w: function(x, w, sizes), x, w)
    return out, *derivative(g)

  return jax.jit(run)


DTYPES = "float32", "bfloat16"
FEW = [(name, dtype) for name in SIZES for dtype in DTYPES if (name, dtype) != ("one row", "bfloat16")]


@pytest.mark.parametrize("name, dtype", few(FEW, [(name, dtype) for name in SIZES for dtype in DTYPES]))
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_equals_a_loop_over_rows(name, dtype, function):
  sizes, rng = np.array(SIZES[name]), np.random.default_rng(0)
  M, E, K, N = sizes.sum(), len(sizes), 16, 136
  x, w, g = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((M, K), (E, K, N), (M, N)))
  out, dx, dw = with_derivatives(function)(x, w, jnp.asarray(sizes, jnp.int32), g)
  assert (out.dtype, dx.dtype, dw.dtype) == (jnp.dtype(dtype),) * 3
  x, w, g = (np.asarray(array, np.float64) for array in (x, w, g))
  group = np.repeat(np.arange(E), sizes)
  want = np.zeros((E, K, N))
  np.add.at(want, group, x[:, :, None] * g[:, None, :])
  tolerance = 1e-5 if dtype == "float32" else 0.02
  pairs = ((out, np.einsum("mk,mkn->mn", x, w[group])), (dx, np.einsum("mn,mkn->mk", g, w[group])), (dw, want))
  for ours, theirs in pairs:
    np.testing.assert_allclose(np.asarray(ours, np.float64), theirs, rtol=0, atol=tolerance * np.abs(theirs).max())


@pytest.mark.parametrize("name", [*FUNCTIONS, "megablox"])
def test_rows_behind_all_groups_count_nowhere(name):
  """Their results and gradients are zeros, whatever stands there."""
  rng, sizes = np.random.default_rng(0), jnp.asarray([3, 0, 7, 20], jnp.int32)
  interpreted = lambda x, w, sizes: gmm(x, w, sizes, x.dtype, (8, 128, 128), interpret=True)
  function = grouped_matmul.with_rows_behind({**FUNCTIONS, "megablox": interpreted}[name], 2)
  expected = FUNCTIONS["tiles"]
  x, w, g = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((64, 128), (4, 128, 128), (64, 128)))
  x, g = x.at[30:].set(jnp.nan), g.at[30:].set(jnp.nan)
  with jax.numpy_dtype_promotion("standard"):  # JAX's own kernel needs it
    out, dx, dw = with_derivatives(function)(x, w, sizes, g)
  alone, alone_dx, alone_dw = with_derivatives(expected)(x[:30], w, sizes, g[:30])
  for ours, theirs in ((out[:30], alone), (dx[:30], alone_dx), (dw, alone_dw)):
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
  assert not out[30:].any() and not dx[30:].any()


@pytest.mark.parametrize(("platform", "name"), [("cpu", "tiles"), ("gpu", "blocks"), ("tpu", "megablox")])
def test_each_platform_has_one(platform, name):
  assert grouped_matmul.choose(platform).name == name
