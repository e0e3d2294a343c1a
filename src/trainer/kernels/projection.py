"""Matmuls of activations with weights, and the function that chooses how to differentiate them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from trainer.kernels import quantized
from trainer.parallel import sharding

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Projection:
  """project(x [*B, *K], w [*K, *N], axes, contracted=len(K)) -> [*B, *N] in the dtype of x, to which w is cast.

  axes: logical axes of w. Where a weight is sharded (see sharding.manual_over_fsdp), it is cast to `gather_dtype` and
  gathered over fsdp first.
  """

  function: Callable[[jax.Array, jax.Array, int], jax.Array]  # of x, the whole w, and `contracted`
  fuses_shared_input: bool  # whether `project_all` joins the weights into one matmul
  prepare_input: Callable[[jax.Array], jax.Array] = lambda x: x  # applied once for all weights of project_each
  gathers_again: bool = False  # gather in the backward pass again; otherwise the policy of remat decides
  first_stage: int = 1  # of a gather; see sharding.first_stage
  gather_dtype: str | None = None  # None: the dtype of x
  wide_units: bool = False  # see `choose`

  def __call__(self, x: jax.Array, w: jax.Array, axes: Axes, contracted: int = 1) -> jax.Array:
    return self.project_each(x, [(w, axes)], contracted)[0]

  def project_each(
    self, x: jax.Array, weights: Iterable[tuple[jax.Array, Axes]], contracted: int = 1
  ) -> tuple[jax.Array, ...]:
    """Returns x times each of the `weights`, in separate matmuls. Their derivatives keep one x for all of them."""
    x = self.prepare_input(x)
    return tuple(self._project(x, w, axes, contracted) for w, axes in weights)

  def _project(self, x: jax.Array, w: jax.Array, axes: Axes, contracted: int) -> jax.Array:
    multiply = lambda x, w: self.function(x, w, contracted)
    if self.wide_units and contracted > 1:
      x = unfused(x.reshape(*x.shape[: x.ndim - contracted], -1))
      multiply = lambda x, w: self.function(x, w.reshape(-1, *w.shape[contracted:]), 1)
    if not sharding.is_manual_over_fsdp():
      return multiply(x, w)
    run = lambda x, w: sharding.with_whole_weight(multiply, x, w, axes, self.first_stage)
    return self.gathering(run)(x, self.to_gather(w, x.dtype))

  def to_gather(self, w: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns the shard `w` of a weight as it travels: in `dtype`, or in gather_dtype. A whole weight is only cast."""
    if not sharding.is_manual_over_fsdp():
      return w.astype(dtype)
    # Without the barrier, the TPU compiler may choose the layout of a shard for a later matmul, and then copy the whole
    # gathered weight.
    return computed_once(w).astype(self.gather_dtype or dtype)

  def gathering(self, run: Callable[[Any, Any], jax.Array]) -> Callable[[Any, Any], jax.Array]:
    """Returns `run`, which gathers weights, or a form of it that gathers again in the backward pass."""
    return jax.checkpoint(run) if self.gathers_again else run

  def project_all(self, x: jax.Array, weights: Sequence[jax.Array], axes: Axes) -> tuple[jax.Array, ...]:
    """Returns x [*B, K] times each of the `weights` [K, N], [*B, N] each. axes: the logical axes of each weight.

    A joint matmul compiles once, reads x once and has one wide gradient. The weights are joined while they are sharded.
    """
    if not self.fuses_shared_input:
      return self.project_each(x, [(w, axes) for w in weights])
    joined = self(x, jnp.stack([w.astype(x.dtype) for w in weights], axis=1), (axes[0], "joined", axes[1]))
    return tuple(jax.lax.index_in_dim(joined, i, -2, keepdims=False) for i in range(len(weights)))


def _plain(x: jax.Array, w: jax.Array, contracted: int) -> jax.Array:
  """Returns x times w, contracted over the last dims of x and the first dims of w, with the derivative of JAX."""
  return jnp.tensordot(x, w.astype(x.dtype), axes=contracted)


PLAIN = Projection(_plain, fuses_shared_input=True)


def choose(
  platform: str, quantization: str, gathers_again: bool = False, first_stage: int = 1, wide_units: bool = False
) -> Projection:
  """Returns the projection for a platform ("cpu", "gpu", "tpu") and a quantization: a key of quantized.MODES, or "".

  gathers_again, first_stage: see the fields of `Projection`. wide_units: whether the matrix units are wider than a head
  (256 on 7x). There the compiler's estimate of a matmul doubles if it contracts head by head, or if a norm of
  heads is fused into it. Two matmuls take less than a joint one, because a product is fused into the second one. It
  changes nothing in 8 bits, which was not compared.
  """
  chosen = Projection(_cpu, fuses_shared_input=False, prepare_input=computed_once) if platform == "cpu" else PLAIN
  if quantization:
    chosen = Projection(functools.partial(_quantized, quantization), fuses_shared_input=True)
  if wide_units and not quantization:
    chosen = dataclasses.replace(chosen, wide_units=True, fuses_shared_input=False)
  # XLA's CPU compiler aborts on the derivative of a gather of bfloat16, a sum in bfloat16 (jax 0.12).
  gather_dtype = "float32" if platform == "cpu" else None
  return dataclasses.replace(chosen, gathers_again=gathers_again, first_stage=first_stage, gather_dtype=gather_dtype)


def _quantized(mode: str, x: jax.Array, w: jax.Array, contracted: int) -> jax.Array:
  return quantized.project(x, w.astype(x.dtype), contracted, mode)


def _cpu(x: jax.Array, w: jax.Array, contracted: int) -> jax.Array:
  """Returns what `_plain` returns, with a derivative that runs at full matmul speed on a CPU.

  Reshapes to matrices first: with more than two dims, the derivative would make transposed copies of the weights.
  """
  size = math.prod(w.shape[:contracted])
  rows, columns = x.shape[: x.ndim - contracted], w.shape[contracted:]
  return _matmul(x.reshape(*rows, size), w.astype(x.dtype).reshape(size, -1)).reshape(*rows, *columns)


@jax.custom_vjp
def computed_once(x: jax.Array) -> jax.Array:
  """Returns x (any shape and dtype) behind an optimization barrier. The gradient passes without a barrier.

  The compiler computes an input of several matmuls only once, and keeps the layout of a shard. Use it once per input,
  because the derivative of a layer saves the result of every barrier.
  """
  return jax.lax.optimization_barrier(x)


computed_once.defvjp(lambda x: (computed_once(x), None), lambda _, g: (g,))


@jax.custom_vjp
def unfused(x: jax.Array) -> jax.Array:
  """Returns x (any shape and dtype). The compiler fuses nothing with it, and nothing with its gradient."""
  return jax.lax.optimization_barrier(x)


unfused.defvjp(lambda x: (unfused(x), None), lambda _, g: (jax.lax.optimization_barrier(g),))


@jax.custom_vjp
def _matmul(x: jax.Array, w: jax.Array) -> jax.Array:
  """Returns x [*B, K] times w [K, N], [*B, N]."""
  return jnp.tensordot(x, w, axes=1)


def _backward(saved: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns (dx, dw).

  dw contracts the rows of x with the rows of g, so one of them must be transposed. The compiler would do this one
  strided element at a time, fused with earlier elementwise operations. Here it is a separate copy of the narrower
  array. The backward pass of a SwiGLU took 0.6 times as long on two x86-64 cores.

  If g is narrower, the small product is transposed at the end. Without the barrier the compiler would swap the operands
  instead, and so transpose the wide array: 35 ms of CPU time instead of 24 for 4096 rows, K = 1024, N = 256.
  """
  x, w = saved
  g = jax.lax.optimization_barrier(g)
  dx = jax.lax.dot_general(g, w, (((g.ndim - 1,), (1,)), ((), ())))
  if x.shape[-1] <= g.shape[-1]:
    return dx, _contract_rows(x, g)
  return dx, jax.lax.optimization_barrier(_contract_rows(g, x)).T


def _contract_rows(narrow: jax.Array, wide: jax.Array) -> jax.Array:
  """Returns the sum over all rows of `narrow` [*B, K] times `wide` [*B, N], [K, N]."""
  rows = tuple(range(narrow.ndim - 1))
  transposed = jnp.moveaxis(narrow, -1, 0)
  return jax.lax.dot_general(transposed, wide, ((tuple(row + 1 for row in rows), rows), ((), ())))


_matmul.defvjp(lambda x, w: (_matmul(x, w), (x, w)), _backward)
