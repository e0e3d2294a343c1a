"""Matmuls of activations with weights, and the one place that chooses how they are differentiated."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from trainer.kernels import quantized


@dataclasses.dataclass(frozen=True)
class Projection:
  """project(x [*B, *K], w [*K, *N], contracted=len(K)) -> [*B, *N] in x's dtype, w cast to it."""

  function: Callable[[jax.Array, jax.Array, int], jax.Array]
  fuses_shared_input: bool  # whether several weights that read one x become one matmul

  def __call__(self, x: jax.Array, w: jax.Array, contracted: int = 1) -> jax.Array:
    return self.function(x, w, contracted)

  def project_all(self, x: jax.Array, weights: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """x [*B, K] with each of the weights, all [K, N]: [*B, N] each.

    One matmul is compiled once, reads x once and has one wide gradient; the weights are put side by side while they are
    sharded.
    """
    if not self.fuses_shared_input:
      return tuple(self(x, w) for w in weights)
    joined = self(x, jnp.stack([w.astype(x.dtype) for w in weights], axis=1))
    return tuple(jax.lax.index_in_dim(joined, i, -2, keepdims=False) for i in range(len(weights)))


def _plain(x: jax.Array, w: jax.Array, contracted: int) -> jax.Array:
  """x contracted over its last `contracted` dims with w's first ones; JAX's own derivative."""
  return jnp.tensordot(x, w.astype(x.dtype), axes=contracted)


PLAIN = Projection(_plain, fuses_shared_input=True)


def choose(platform: str, quantization: str) -> Projection:
  """The projection for a platform ("cpu", "gpu", "tpu"), and for one of quantized.MODES or ""."""
  if quantization:
    return Projection(functools.partial(_quantized, quantization), fuses_shared_input=True)
  return Projection(_cpu, fuses_shared_input=False) if platform == "cpu" else PLAIN


def _quantized(mode: str, x: jax.Array, w: jax.Array, contracted: int) -> jax.Array:
  return quantized.project(x, w.astype(x.dtype), contracted, mode)


def _cpu(x: jax.Array, w: jax.Array, contracted: int) -> jax.Array:
  """`_plain` of a matrix, with a derivative that XLA's CPU compiler runs at the speed of its matmul.

  With more dims than two the derivative's weights would be transposed copies.
  """
  size = math.prod(w.shape[:contracted])
  rows, columns = x.shape[: x.ndim - contracted], w.shape[contracted:]
  return _matmul(x.reshape(*rows, size), w.astype(x.dtype).reshape(size, -1)).reshape(*rows, *columns)


@jax.custom_vjp
def _matmul(x: jax.Array, w: jax.Array) -> jax.Array:
  """x [*B, K], w [K, N] -> [*B, N]."""
  return jnp.tensordot(x, w, axes=1)


def _forward(x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  x = jax.lax.optimization_barrier(x)  # one array for this product and that of the derivative
  return _matmul(x, w), (x, w)


def _backward(saved: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
  """(dx, dw).

  dw contracts the rows of x with those of g, so one of them must be transposed. Left to the compiler that happens one
  strided element at a time, inside whatever elementwise work stands before it; here it is a copy of its own, of the
  narrower of the two. A SwiGLU's backward pass took 0.6 times as long on two x86-64 cores.
  """
  x, w = saved
  g = jax.lax.optimization_barrier(g)
  dx = jax.lax.dot_general(g, w, (((g.ndim - 1,), (1,)), ((), ())))
  if x.shape[-1] <= g.shape[-1]:
    return dx, _contract_rows(x, g)
  return dx, _contract_rows(g, x).T


def _contract_rows(narrow: jax.Array, wide: jax.Array) -> jax.Array:
  """[*B, K], [*B, N] -> [K, N], the sum over all rows."""
  rows = tuple(range(narrow.ndim - 1))
  transposed = jnp.moveaxis(narrow, -1, 0)
  return jax.lax.dot_general(transposed, wide, ((tuple(row + 1 for row in rows), rows), ((), ())))


_matmul.defvjp(_forward, _backward)
