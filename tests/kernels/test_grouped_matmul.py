"""Grouped matmuls and their derivatives against a loop over rows in float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.megablox import gmm
from tests.support.seeds import few

from trainer.config.errors import ConfigError
from trainer.kernels import grouped_matmul, grouped_matmul_gpu, quantized

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
FUNCTIONS = {name: grouped_matmul.differentiable(*PRODUCTS[name], "") for name in PRODUCTS}


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


IN_INT8 = {"tiles in int8": grouped_matmul.differentiable(*PRODUCTS["tiles"], "int8")}


@pytest.mark.parametrize("name", [*FUNCTIONS, "megablox", *IN_INT8])
def test_rows_behind_all_groups_count_nowhere(name):
  """Their results and gradients are zeros, whatever stands there. No scale depends on them."""
  rng, sizes = np.random.default_rng(0), jnp.asarray([3, 0, 7, 20], jnp.int32)
  interpreted = lambda x, w, sizes: gmm(x, w, sizes, x.dtype, (8, 128, 128), interpret=True)
  function = grouped_matmul.with_rows_behind({**FUNCTIONS, **IN_INT8, "megablox": interpreted}[name], 2)
  expected = IN_INT8["tiles in int8"] if name in IN_INT8 else FUNCTIONS["tiles"]
  x, w, g = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((64, 128), (4, 128, 128), (64, 128)))
  x, g = x.at[30:].set(jnp.nan), g.at[30:].set(jnp.nan)
  with jax.numpy_dtype_promotion("standard"):  # JAX's own kernel needs it
    out, dx, dw = with_derivatives(function)(x, w, sizes, g)
  alone, alone_dx, alone_dw = with_derivatives(expected)(x[:30], w, sizes, g[:30])
  for ours, theirs in ((out[:30], alone), (dx[:30], alone_dx), (dw, alone_dw)):
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
  assert not out[30:].any() and not dx[30:].any()


def dequantized(array, kind, *kept):
  """The 8-bit values of `array` times their scales, one for each index of the dims `kept`, in float64.

  The largest magnitude becomes the largest value; qwix adds one half to that of integers.
  """
  axes = tuple(axis for axis in range(array.ndim) if axis not in kept)
  largest = 127.5 if kind == jnp.int8 else float(jnp.finfo(kind).max)
  scale = np.abs(array).max(axis=axes, keepdims=True) / np.float32(largest)
  scaled = array / np.where(scale == 0, np.float32(1), scale)
  values = np.clip(np.round(scaled), -128, 127) if kind == jnp.int8 else scaled.astype(kind)
  return values.astype(np.float64) * scale.astype(np.float64)


SHAPES = {"small": (100, 16, 136), "several tiles": (1300, 640, 520)}


@pytest.mark.parametrize("mode", quantized.MODES)
@pytest.mark.parametrize("shape", few(["small"], SHAPES))
@pytest.mark.parametrize("name", few(["uneven", "all rows in one group"], SIZES))
def test_in_eight_bits_equals_a_loop_over_groups_of_the_dequantized_operands(name, shape, mode):
  (M, K, N), sizes, rng = SHAPES[shape], np.array(SIZES[name]), np.random.default_rng(0)
  if sizes.sum() == 100:
    sizes = sizes * (M // 100)
  M, E = sizes.sum(), len(sizes)
  # Rows, columns and experts of very different sizes show a scale in a wrong place.
  x, w, g = (rng.standard_normal(shape).astype(np.float32) for shape in ((M, K), (E, K, N), (M, N)))
  x, g = (array * 10 ** rng.uniform(-2, 2, (M, 1)).astype(np.float32) for array in (x, g))
  w, g = (array * 10 ** rng.uniform(-2, 2, N).astype(np.float32) for array in (w, g))
  w *= 10 ** rng.uniform(-2, 2, (E, 1, 1)).astype(np.float32)
  if mode == "int8":
    x, w, g = abs(x), abs(w), abs(g)  # the largest magnitude of a row is a tie if it is negative: -127.5
  function = grouped_matmul.differentiable(*PRODUCTS["tiles"], mode)
  got = with_derivatives(function)(x, w, jnp.asarray(sizes, jnp.int32), g)
  kind, gradient = quantized.MODES[mode]
  rows, w_out, w_dx = dequantized(x, kind, 0), dequantized(w, kind, 0, 2), dequantized(w, kind, 0, 1)
  g_rows, columns, g_columns = dequantized(g, gradient, 0), dequantized(x, kind, 1), dequantized(g, gradient, 1)
  group = np.split(np.arange(M), np.cumsum(sizes)[:-1])
  pairs = (
    [(rows[group[e]], w_out[e]) for e in range(E)],
    [(g_rows[group[e]], w_dx[e].T) for e in range(E)],
    [(columns[group[e]].T, g_columns[group[e]]) for e in range(E)],
  )
  for ours, factors in zip(got, pairs, strict=True):
    join = np.stack if ours.ndim == 3 else np.concatenate
    want, magnitude = join([a @ b for a, b in factors]), join([abs(a) @ abs(b) for a, b in factors])
    assert ours.dtype == jnp.float32
    # A value near a tie may be rounded to the other side: one step of one of K >= 16 products.
    assert np.all(np.abs(ours - want) <= 5e-3 * magnitude)
    assert np.quantile(np.abs(ours - want), 0.9) <= 1e-6 * np.max(magnitude)


@pytest.mark.parametrize(
  ("platform", "mode", "name"),
  [
    ("cpu", "", "tiles"),
    ("gpu", "", "blocks"),
    ("tpu", "", "megablox"),
    ("cpu", "fp8", "tiles"),
  ],
)
def test_each_platform_has_one(platform, mode, name):
  assert grouped_matmul.choose(platform, mode).name == name


@pytest.mark.parametrize(("platform", "mode"), [("gpu", "int8"), ("gpu", "fp8_full"), ("tpu", "int8"), ("tpu", "fp8")])
def test_a_platform_without_a_fast_8_bit_form_refuses_it(platform, mode):
  named = f'quantization={mode}: the matmuls of experts .* on {platform.upper()}s: .*\nSet quantization="".'
  with pytest.raises(ConfigError, match=named):
    grouped_matmul.choose(platform, mode)


def test_int8_products_are_summed_in_int32():
  arrays = [jnp.ones(shape, jnp.bfloat16) for shape in ((8, 4), (2, 4, 6), (8, 6))]
  run = with_derivatives(IN_INT8["tiles in int8"])
  text = run.lower(*arrays[:2], jnp.asarray([3, 5], jnp.int32), arrays[2]).as_text()
  dots = [line for line in text.splitlines() if "dot_general" in line]
  assert len(dots) == 3 and all(dot.count("xi8>") == 2 and dot.endswith("xi32>") for dot in dots), dots
