"""The grouped matmul for GPUs: Pallas kernels (Triton) that read each row and each weight where it lies.

XLA's ragged_dot multiplies all rows by all groups on a GPU: with 128 experts, 128 times the work. Here the rows of
each group are padded to whole blocks. A program multiplies one block by the weights of its group, or adds up the outer
products of one group's blocks. Sums have a fixed order, so each run gives the same bits.

M: rows. E: groups. K, N: widths of the two sides. P: rows in whole blocks.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

BLOCK = 128  # rows, and columns of a result
DEPTH_BYTES = 128  # of a row that one iteration multiplies. With STAGES, 96 KiB of shared memory for all types
STAGES = 3

Ref = Any  # of Pallas


def times_weights(
  x: jax.Array, w: jax.Array, sizes: jax.Array, dtype: jnp.dtype, *, transposed: bool, interpret: bool = False
) -> jax.Array:
  """The first product of `grouped_matmul.differentiable`. interpret: on any platform, for tests."""
  blocks = _Blocks.of(len(x), sizes)
  return _times_weights(blocks, blocks.pad(x), w, dtype, interpret, transposed=transposed)[blocks.places]


def times_rows(x: jax.Array, g: jax.Array, sizes: jax.Array, dtype: jnp.dtype, *, interpret: bool = False) -> jax.Array:
  """The second product of `grouped_matmul.differentiable`. interpret: on any platform, for tests."""
  blocks = _Blocks.of(len(x), sizes)
  return _times_rows(blocks, blocks.pad(x), blocks.pad(g), interpret).astype(dtype)


@dataclasses.dataclass(frozen=True)
class _Blocks:
  """How M rows are padded, so that each group begins with a block. Blocks at the end may belong to no group."""

  groups: jax.Array  # int32 [P / BLOCK]: the group of each block
  rows: jax.Array  # int32 [P]: the row at each place; M in the padding
  places: jax.Array  # int32 [M]: the place of each row
  first: jax.Array  # int32 [E]: the first block of each group
  counts: jax.Array  # int32 [E]: its number of blocks

  @classmethod
  def of(cls, M: int, sizes: jax.Array) -> _Blocks:
    E = len(sizes)
    counts = -(-sizes // BLOCK)
    ends, row_ends = jnp.cumsum(counts), jnp.cumsum(sizes)
    first, starts = ends - counts, row_ends - sizes
    groups = jnp.minimum(_count_at_most(ends, M // BLOCK + E), E - 1)
    offsets = (jnp.arange(len(groups), dtype=jnp.int32) - first[groups])[:, None] * BLOCK + jnp.arange(BLOCK)
    rows = jnp.where(offsets < sizes[groups][:, None], starts[groups][:, None] + offsets, M).reshape(-1)
    of_row = _count_at_most(row_ends, M)
    return cls(groups, rows, first[of_row] * BLOCK + jnp.arange(M, dtype=jnp.int32) - starts[of_row], first, counts)

  def pad(self, x: jax.Array) -> jax.Array:
    """Returns the rows of x [M, K] at their places, [P, K]. The padding is zero."""
    return jnp.take(x, self.rows, axis=0, mode="fill", fill_value=0)


def _count_at_most(ends: jax.Array, n: int) -> jax.Array:
  """Returns for each i below n how many of the `ends` [E] are at most i, int32 [n]."""
  return jnp.sum(ends[None] <= jnp.arange(n, dtype=jnp.int32)[:, None], axis=1, dtype=jnp.int32)


def _times_weights(
  blocks: _Blocks, x: jax.Array, w: jax.Array, dtype: jnp.dtype, interpret: bool, *, transposed: bool
) -> jax.Array:
  """Returns x [P, K] times the weights of each block's group, w [E, K, N], or [E, N, K] if transposed: [P, N]."""
  (P, K), N = x.shape, w.shape[1 if transposed else 2]
  depth = DEPTH_BYTES // x.dtype.itemsize

  def kernel(group_ref: Ref, x_ref: Ref, w_ref: Ref, out_ref: Ref) -> None:
    group, at = group_ref[0], pl.program_id(1) * BLOCK
    inside_N = at + jnp.arange(BLOCK) < N

    def add(i: jax.Array, total: jax.Array) -> jax.Array:
      begin = i * depth
      inside_K = begin + jnp.arange(depth) < K
      rows = triton.load(x_ref.at[:, pl.ds(begin, depth)], mask=_both(BLOCK, inside_K), other=0)
      if transposed:
        weights = w_ref.at[group, pl.ds(at, BLOCK), pl.ds(begin, depth)]
        loaded = triton.load(weights, mask=inside_N[:, None] & inside_K[None], other=0).T
      else:
        weights = w_ref.at[group, pl.ds(begin, depth), pl.ds(at, BLOCK)]
        loaded = triton.load(weights, mask=inside_K[:, None] & inside_N[None], other=0)
      return total + jnp.dot(rows, loaded, preferred_element_type=jnp.float32)

    total = jax.lax.fori_loop(0, -(-K // depth), add, jnp.zeros((BLOCK, BLOCK), jnp.float32))
    triton.store(out_ref.at[:, pl.ds(at, BLOCK)], total.astype(out_ref.dtype), mask=_both(BLOCK, inside_N))

  return pl.pallas_call(
    kernel,
    out_shape=jax.ShapeDtypeStruct((P, N), dtype),
    grid=(P // BLOCK, -(-N // BLOCK)),
    in_specs=[
      pl.BlockSpec((1,), lambda i, j: (i,)),
      pl.BlockSpec((BLOCK, K), lambda i, j: (i, 0)),
      pl.BlockSpec(memory_space=pl.ANY),
    ],
    out_specs=pl.BlockSpec((BLOCK, N), lambda i, j: (i, 0)),
    compiler_params=triton.CompilerParams(num_warps=4, num_stages=STAGES),
    interpret=interpret,
    name="grouped_matmul",
  )(blocks.groups, x, w)


def _times_rows(blocks: _Blocks, x: jax.Array, g: jax.Array, interpret: bool) -> jax.Array:
  """Returns the sum of the outer products of x [P, K] and g [P, N] in each group, float32 [E, K, N]."""
  K, N, E = x.shape[1], g.shape[1], len(blocks.first)
  depth = DEPTH_BYTES // x.dtype.itemsize
  steps = BLOCK // depth

  def kernel(first_ref: Ref, count_ref: Ref, x_ref: Ref, g_ref: Ref, out_ref: Ref) -> None:
    at_K, at_N = pl.program_id(1) * BLOCK, pl.program_id(2) * BLOCK
    inside_K, inside_N = at_K + jnp.arange(BLOCK) < K, at_N + jnp.arange(BLOCK) < N

    def add(i: jax.Array, total: jax.Array) -> jax.Array:
      rows = pl.ds(i * depth, depth)
      left = triton.load(x_ref.at[rows, pl.ds(at_K, BLOCK)], mask=_both(depth, inside_K), other=0)
      right = triton.load(g_ref.at[rows, pl.ds(at_N, BLOCK)], mask=_both(depth, inside_N), other=0)
      return total + jnp.dot(left.T, right, preferred_element_type=jnp.float32)

    begin = first_ref[0] * steps
    total = jax.lax.fori_loop(begin, begin + count_ref[0] * steps, add, jnp.zeros((BLOCK, BLOCK), jnp.float32))
    out = out_ref.at[pl.ds(at_K, BLOCK), pl.ds(at_N, BLOCK)]
    triton.store(out, total, mask=inside_K[:, None] & inside_N[None])

  of_group, whole = pl.BlockSpec((1,), lambda e, i, j: (e,)), pl.BlockSpec(memory_space=pl.ANY)
  return pl.pallas_call(
    kernel,
    out_shape=jax.ShapeDtypeStruct((E, K, N), jnp.float32),
    grid=(E, -(-K // BLOCK), -(-N // BLOCK)),
    in_specs=[of_group, of_group, whole, whole],
    out_specs=pl.BlockSpec((None, K, N), lambda e, i, j: (e, 0, 0)),
    compiler_params=triton.CompilerParams(num_warps=8, num_stages=STAGES),
    interpret=interpret,
    name="grouped_outer_products",
  )(blocks.first, blocks.counts, x, g)


def _both(rows: int, inside: jax.Array) -> jax.Array:
  """Returns the mask [rows, columns] of the columns that are inside."""
  return jnp.broadcast_to(inside[None], (rows, len(inside)))
