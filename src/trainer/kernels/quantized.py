"""Matmuls of activations with weights in 8 bits, forward and backward, with qwix.

A projection has three matmuls (out, dx, dw). Each one quantizes its two operands symmetrically, with one float32 scale
per row that is not contracted. There is no calibration, and nothing is kept between steps. Weights, optimizer state and
gradients keep their types. Integer products are summed in int32.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

# Mode -> (type of activations and weights, type of incoming gradients). Gradients need the range of e5m2, the other
# arrays the precision of e4m3 (Micikevicius et al., "FP8 formats for deep learning", 2022, section 3).
MODES: Mapping[str, tuple[jnp.dtype, jnp.dtype]] = MappingProxyType(
  {
    "int8": (jnp.dtype(jnp.int8), jnp.dtype(jnp.int8)),
    "fp8": (jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e4m3fn)),
    "fp8_full": (jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)),
  }
)

_Dims = tuple[tuple[int, ...], tuple[int, ...]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def project(x: jax.Array, w: jax.Array, contracted: int, mode: str) -> jax.Array:
  """Returns x [*B, *K] times w [*K, *N], [*B, *N] in the dtype of x; `contracted` is the number of dims K.

  The backward pass treats rounding as the identity (straight-through estimator).
  """
  return _forward(x, w, contracted, mode)[0]


def _forward(x: jax.Array, w: jax.Array, contracted: int, mode: str) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  kind = MODES[mode][0]
  dims = tuple(range(x.ndim - contracted, x.ndim)), tuple(range(contracted))
  return _dot(x, w, dims, kind, kind).astype(x.dtype), (x, w)


def _backward(
  contracted: int, mode: str, saved: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array]:
  x, w = saved
  kind, gradient = MODES[mode]
  rows = x.ndim - contracted
  dx = _dot(g, w, (tuple(range(rows, g.ndim)), tuple(range(contracted, w.ndim))), gradient, kind)
  dw = _dot(x, g, (tuple(range(rows)), tuple(range(rows))), kind, gradient)
  return dx.astype(x.dtype), dw.astype(w.dtype)


project.defvjp(_forward, _backward)


def _dot(a: jax.Array, b: jax.Array, contracted: _Dims, a_kind: jnp.dtype, b_kind: jnp.dtype) -> jax.Array:
  """Returns a times b in float32, both quantized, contracted over the `contracted` dims of each."""
  import qwix

  operands = []
  for array, dims, kind in ((a, contracted[0], a_kind), (b, contracted[1], b_kind)):
    operands.append(_quantize(array, kind, [axis for axis in range(array.ndim) if axis not in dims]))
  with jax.numpy_dtype_promotion("standard"):  # qwix multiplies integers by float scales; the tests forbid it elsewhere
    return qwix.dot_general(*operands, (contracted, ((), ())))


def _quantize(array: jax.Array, kind: jnp.dtype, kept: Sequence[int]) -> Any:
  """Returns `array` as a QArray of qwix, with a float32 scale for each index of the dims `kept`."""
  import qwix  # imported here: it takes a tenth of a second, and most runs are not quantized

  return qwix.quantize(array.astype(jnp.float32), kind, channelwise_axes=kept)
