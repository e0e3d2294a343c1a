"""Sums gradients over slices inside the backward pass, so that they travel while the rest is still being computed."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from trainer.parallel.mesh import DATA

LOAD = "load"  # the name of a weight whose gradient is a number of tokens for each expert; bfloat16 would round it


@dataclasses.dataclass(frozen=True)
class GradReduce:
  """Makes the sums over slices come out as the gradients of `totals`, inside a trace that is manual over `data`.

  totals: float32 arrays shaped like the weights: the sums of this slice's earlier micro-batches, or zeros.
  dtype: type in which gradients travel between slices, float32 or bfloat16.
  adds_totals: False if all totals are 0.
  """

  totals: Any
  dtype: str
  adds_totals: bool

  def attach(self, weights: Any, totals: Any, *, adds_totals: bool, is_sum: bool = False) -> Any:
    """Returns `weights` unchanged. The gradient of `totals` is the sum over slices of the weights' gradient and totals.

    adds_totals: whether `totals` count; False if they are 0. is_sum: the gradient that arrives is a sum over slices
    already. The gradient of the weights themselves is 0.
    """

    def attach_one(path: Any, w: jax.Array, total: jax.Array) -> jax.Array:
      is_count = getattr(path[-1], "key", "") == LOAD if path else False
      return _attach(w, total, "float32" if is_count else self.dtype, is_sum, adds_totals)

    return jax.tree_util.tree_map_with_path(attach_one, weights, totals)

  def rows_are_smaller(self, rows: float, vocab: float, row_dtype: Any) -> bool:
    """Returns whether sending the gradients of `rows` looked-up rows is less than reducing a table of `vocab` rows.

    rows, vocab: shares of a device. With k slices it sends (k - 1) times its rows, or 2 (k - 1) / k times its table.
    """
    return jax.lax.axis_size(DATA) * rows * jnp.dtype(row_dtype).itemsize < 2 * vocab * jnp.dtype(self.dtype).itemsize


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _attach(w: jax.Array, total: jax.Array, dtype: str, is_sum: bool, adds_total: bool) -> jax.Array:
  return w


def _backward(
  dtype: str, is_sum: bool, adds_total: bool, total: jax.Array | None, g: jax.Array
) -> tuple[None, jax.Array]:
  g = g.astype(jnp.float32)  # in bfloat16, sums over many micro-batches lose bits
  if is_sum:
    return None, g if total is None else g + _sum_over_slices(total, dtype)
  return None, _sum_over_slices(g if total is None else g + total, dtype)


_attach.defvjp(lambda w, total, dtype, is_sum, adds_total: (w, total if adds_total else None), _backward)


def _sum_over_slices(x: jax.Array, dtype: str) -> jax.Array:
  """Returns the float32 sum of x over slices, which exchange it in `dtype`."""
  if dtype == "float32":
    return jax.lax.psum(x, DATA)
  assert dtype == "bfloat16", dtype
  # XLA's CPU compiler aborts on this sum of bfloat16 (jax 0.12), so a CPU sums the same rounded numbers in float32.
  rounded = lambda x: jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
  return jax.lax.platform_dependent(
    x,
    cpu=lambda x: rounded(jax.lax.psum(rounded(x), DATA)),
    default=lambda x: jax.lax.psum(x.astype(jnp.bfloat16), DATA).astype(jnp.float32),
  )
