"""Grouped matmuls and their derivatives against a loop over rows in float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer.kernels import grouped_matmul, grouped_matmul_gpu

SIZES = {
  "uneven": [13, 0, 40, 1, 46],
  "all rows in one group": [0, 0, 100, 0, 0],
  "the first group and the last": [60, 0, 0, 0, 40],
  "one row": [0, 0, 0, 1, 0],
}
FUNCTIONS = {
  "tiles": grouped_matmul.in_tiles,
  "blocks": lambda x, w, sizes: grouped_matmul_gpu.in_blocks(x, w, sizes, True),  # ran on an H200: kernels_gpu.md
}


@functools.cache
def with_derivatives(function):
  """Compiled once for all groups of the same number of rows."""

  def run(x, w, sizes, g):
    out, derivative = jax.vjp(lambda x, w: function(x, w, sizes), x, w)
    return out, *derivative(g)

  return jax.jit(run)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SIZES)
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


@pytest.mark.parametrize(("platform", "name"), [("cpu", "tiles"), ("gpu", "blocks"), ("tpu", "megablox")])
def test_each_platform_has_one(platform, name):
  assert grouped_matmul.choose(platform).name == name
