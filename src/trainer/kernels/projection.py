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
  fuses: bool  # whether several weights that read one x become one matmul

  def __call__(self, x: jax.Array, w: jax.Array, contracted: int = 1) -> jax.Array:
    return self.function(x, w, contracted)

  def together(self, x: jax.Array, weights: Sequence[jax.Array], axis: int) -> tuple[jax.Array, ...]:
    """x [*B, K] with each of the weights [K, ..], which differ in the size of their dim `axis` alone.

    One matmul is compiled once, reads x once and has one wide gradient; the weights are put side by side while they are
    sharded.
    """
    if not self.fuses:
      return tuple(self(x, w, 1) for w in weights)
    joined = jnp.concatenate([w.astype(x.dtype) for w in weights], axis)
    ends = [sum(w.shape[axis] for w in weights[: i + 1]) for i in range(len(weights) - 1)]
    return tuple(jnp.split(self(x, joined, 1), ends, axis + x.ndim - 2))


def _plain(x: jax.Array, w: jax.Array, contracted: int) -> jax.Array:
  """x contracted over its last `contracted` dims with w's first ones; JAX's own derivative."""
  return jnp.tensordot(x, w.astype(x.dtype), axes=contracted)


PLAIN = Projection(_plain, fuses=True)


def choose(platform: str, quantization: str) -> Projection:
  """The projection for a platform ("cpu", "gpu", "tpu"), and for one of quantized.MODES or ""."""
  if quantization:
    return Projection(functools.partial(_quantized, quantization), fuses=True)
  return Projection(_cpu, fuses=False) if platform == "cpu" else PLAIN


def _quantized(mode: str, x: jax.Array, w: jax.Array, contracted: int) -> jax.Array:
  return quantized.project(x, w.astype(x.dtype), contracted, mode)


def _cpu(x: jax.Array, w: jax.Array, contracted: int) -> jax.Array:
  """`_plain`, with a derivative that XLA's CPU compiler runs at the speed of its matmul."""
  return _projection(x, w.astype(x.dtype), contracted)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _projection(x: jax.Array, w: jax.Array, contracted: int) -> jax.Array:
  return jnp.tensordot(x, w, axes=contracted)


def _forward(x: jax.Array, w: jax.Array, contracted: int) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  return _projection(x, w, contracted), (x, w)


def _backward(contracted: int, saved: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
  """(dx, dw).

  dw contracts the rows of x with those of g, so one of them must be transposed. Left to the compiler that happens one
  strided element at a time, inside whatever elementwise work stands before it; here it is a copy of its own, of the
  narrower of the two. A SwiGLU's backward pass took 0.6 times as long on two x86-64 cores.
  """
  x, w = saved
  rows = x.ndim - contracted
  g = jax.lax.optimization_barrier(g)
  dims = (tuple(range(rows, g.ndim)), tuple(range(contracted, w.ndim)))
  dx = jax.lax.dot_general(g, w, (dims, ((), ())))
  if math.prod(x.shape[rows:]) <= math.prod(g.shape[rows:]):
    return dx, _contract_rows(x, g, rows)
  dw = _contract_rows(g, x, rows)
  columns = g.ndim - rows
  return dx, jnp.transpose(dw, (*range(columns, dw.ndim), *range(columns)))


def _contract_rows(narrow: jax.Array, wide: jax.Array, rows: int) -> jax.Array:
  """[*narrow's columns, *wide's columns]: the sum over the first `rows` dims of both."""
  narrow = jnp.transpose(jax.lax.optimization_barrier(narrow), (*range(rows, narrow.ndim), *range(rows)))
  narrow = jax.lax.optimization_barrier(narrow)
  dims = (tuple(range(narrow.ndim - rows, narrow.ndim)), tuple(range(rows)))
  return jax.lax.dot_general(narrow, wide, (dims, ((), ())))


_projection.defvjp(_forward, _backward)
