"""The Pallas kernels of attention_tpu: forward, and backward.

Blocks are [queries, H] and [keys, H]. The numbers of a position of q are on all lanes of a row in the forward kernel,
whose scores are [queries, keys], and in a row of lanes in the backward kernel, whose scores are [keys, queries].
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from trainer.kernels import attention_tpu_steps as steps_of
from trainer.kernels.attention_tpu_steps import LANES, Steps, largest_block

SUBLANES = 8
LOWEST, HIDDEN = -1e30, -2e30  # a maximum before any score, and a masked score: exp2(HIDDEN - LOWEST) is 0
_BY_LAST = (((1,), (1,)), ((), ()))  # x [m, h], y [n, h] -> x y' [m, n]


@dataclass(frozen=True)
class Sizes:
  """What the kernels know when they are compiled."""

  queries: int  # of a block
  keys: int  # of a block
  chunk: int  # queries of a head whose gradients are in VMEM at a time
  scores: int  # of a head, that are computed for rows of one segment
  vmem: int  # bytes
  interpret: Any  # as `pl.pallas_call` takes it


def _ranges(ids: jax.Array, block: int) -> jax.Array:
  """Returns the least and the largest segment id of each block of positions, of ids [B, T].

  int32 [B, 2, blocks] as one dim: scalar memory has a whole tile for the last two dims of an array.
  """
  blocks = ids.reshape(ids.shape[0], -1, block)
  return jnp.stack([blocks.min(-1), blocks.max(-1)], axis=1).reshape(-1)


def _on_lanes(ids: jax.Array) -> jax.Array:
  return jnp.broadcast_to(ids[:, None], (ids.shape[0], SUBLANES, ids.shape[1]))


def _on_sublanes(ids: jax.Array) -> jax.Array:
  return jnp.broadcast_to(ids[..., None], (*ids.shape, LANES))


def _when_visible(step: jax.Array, refs: _Forward | _Backward, compute: Callable[[bool], None]) -> None:
  """Calls `compute`, with whether the block of a step needs a mask, if some query of it may see a key of it."""
  of_queries, of_keys, (rows,) = refs.query_ranges, refs.key_ranges, refs.starts.shape
  columns = rows * of_keys.shape[0] // of_queries.shape[0]
  ends = [2 * pl.program_id(0) + end for end in (0, 1)]
  first_query, last_query = (of_queries[end * rows + steps_of.row(step)] for end in ends)
  first_key, last_key = (of_keys[end * columns + steps_of.column(step)] for end in ends)
  runs = (step & steps_of.RUN != 0) & (first_query <= last_key) & (first_key <= last_query)
  one_segment = (first_query == last_query) & (first_key == last_key) & (first_query == first_key)
  masked = (step & steps_of.MASKED != 0) | jnp.logical_not(one_segment)
  for with_mask in (False, True):
    pl.when(runs & (masked == with_mask))(functools.partial(compute, with_mask))


def _sees(sizes: Sizes, starts: Any, step: jax.Array, end: int, first: int) -> jax.Array:
  """Returns whether the query before place `end` of a block may see the key at place `first` of a block."""
  return starts[steps_of.row(step)] + end > steps_of.column(step) * sizes.keys + first


def _positions(sizes: Sizes, starts: Any, step: jax.Array, of_q: pl.Slice, of_k: pl.Slice) -> tuple[Any, Any]:
  """Returns the first position of some queries and of some keys of a block."""
  return starts[steps_of.row(step)] + of_q.start, steps_of.column(step) * sizes.keys + of_k.start


def _hide(scores: jax.Array, q_start: Any, k_start: Any, q_ids: jax.Array, k_ids: jax.Array, q_dim: int) -> jax.Array:
  """Returns scores [m, n], where q_dim is the dim of the queries, with HIDDEN for keys that a query does not see.

  q_start, k_start: first positions. The ids broadcast to the scores.
  """
  q_positions = q_start + lax.broadcasted_iota(jnp.int32, scores.shape, q_dim)
  k_positions = k_start + lax.broadcasted_iota(jnp.int32, scores.shape, 1 - q_dim)
  return jnp.where((q_positions >= k_positions) & (q_ids == k_ids), scores, HIDDEN)


def _widened(x: jax.Array, width: int) -> jax.Array:
  """Returns x [m, 128], with equal numbers in a row, as [m, width]."""
  return x[:, :width] if width <= LANES else jnp.tile(x, (1, math.ceil(width / LANES)))[:, :width]


def forward(sizes: Sizes, steps: Steps, arrays: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
  """Returns out [B, N, T, H], and the binary logarithms of the sums of exponentials, float32 [B, N, 1, T]."""
  q, k, v, q_ids, k_ids = arrays
  (batch, heads, length, width), group = q.shape, q.shape[1] // k.shape[1]
  of_queries = lambda b, n, at, steps, *_: (b, n, steps_of.row(steps[at]), 0)
  of_keys = lambda b, n, at, steps, *_: (b, lax.div(n, jnp.int32(group)), steps_of.column(steps[at]), 0)
  query_block, key_block = (None, None, sizes.queries, width), (None, None, sizes.keys, width)
  grid = pltpu.PrefetchScalarGridSpec(
    num_scalar_prefetch=4,
    grid=(batch, heads, len(steps.forward)),
    in_specs=[
      pl.BlockSpec(query_block, of_queries),
      pl.BlockSpec(key_block, of_keys),
      pl.BlockSpec(key_block, of_keys),
      pl.BlockSpec((None, sizes.queries, LANES), lambda b, n, at, steps, *_: (b, steps_of.row(steps[at]), 0)),
      pl.BlockSpec((None, SUBLANES, sizes.keys), lambda b, n, at, steps, *_: (b, 0, steps_of.column(steps[at]))),
    ],
    out_specs=[
      pl.BlockSpec(query_block, of_queries),
      pl.BlockSpec((None, None, 1, sizes.queries), lambda b, n, at, steps, *_: (b, n, 0, steps_of.row(steps[at]))),
    ],
    scratch_shapes=[pltpu.VMEM((sizes.queries, n), jnp.float32) for n in (LANES, LANES, width)],
  )
  call = pl.pallas_call(
    functools.partial(_forward_kernel, sizes),
    grid_spec=grid,
    out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((batch, heads, 1, length), jnp.float32)],
    compiler_params=_parameters(sizes, dims=3),
    cost_estimate=_cost(sizes, 2, q, k),
    interpret=sizes.interpret,
    name="flash_attention_forward",
  )
  ranges = _ranges(q_ids, sizes.queries), _ranges(k_ids, sizes.keys)
  out, norms = call(steps.forward, steps.starts, *ranges, q, k, v, _on_sublanes(q_ids), _on_lanes(k_ids))
  return out, norms


def _parameters(sizes: Sizes, dims: int) -> pltpu.CompilerParams:
  """Returns the options of a kernel whose grid has so many dims. The first two are rows and heads, in any order."""
  semantics = ["parallel"] * 2 + ["arbitrary"] * (dims - 2)
  return pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=sizes.vmem)


def _cost(sizes: Sizes, matmuls: int, q: jax.Array, k: jax.Array) -> pl.CostEstimate:
  """Returns the cost of so many matmuls for each of the scores."""
  scores = q.shape[0] * q.shape[1] * sizes.scores
  moved = matmuls * (q.size + k.size) * q.dtype.itemsize
  return pl.CostEstimate(flops=matmuls * 2 * scores * q.shape[-1], transcendentals=scores, bytes_accessed=moved)


class _Forward(NamedTuple):
  """What the forward kernel reads and writes, in the order of its arguments."""

  steps: Any
  starts: Any
  query_ranges: Any
  key_ranges: Any
  q: Any
  k: Any
  v: Any
  q_ids: Any  # equal on all lanes
  k_ids: Any  # equal on all sublanes
  out: Any
  norms: Any
  maxima: Any  # of the scores of each query, equal on all lanes
  sums: Any  # of its exponentials; the lanes are added in the end
  total: Any  # the exponentials times the values, float32 [queries, H]


def _forward_kernel(sizes: Sizes, *given: Any) -> None:
  """Adds one block of keys to the softmax of one block of queries."""
  refs = _Forward(*given)
  step = refs.steps[pl.program_id(2)]

  @pl.when(step & steps_of.FIRST != 0)
  def _() -> None:
    refs.maxima[...] = jnp.full_like(refs.maxima, LOWEST)
    refs.sums[...] = jnp.zeros_like(refs.sums)
    refs.total[...] = jnp.zeros_like(refs.total)

  def compute(masked: bool) -> None:
    tile = largest_block(sizes.keys, steps_of.TILE)
    firsts = range(0, sizes.keys, tile)
    # So many queries do not see a tile if the block is on the diagonal.
    above = [min(first, sizes.queries) if masked else 0 for first in firsts]
    add = lambda queries, first: _add_forward(sizes, refs, step, pl.ds(*queries), pl.ds(first, tile), masked)
    for first, hidden in zip(firsts, above, strict=True):
      if hidden < sizes.queries:
        add((hidden, sizes.queries - hidden), first)
    for first, hidden in zip(firsts, above, strict=True):
      if hidden:
        pl.when(_sees(sizes, refs.starts, step, hidden, first))(functools.partial(add, (0, hidden), first))

  _when_visible(step, refs, compute)

  @pl.when(step & steps_of.LAST != 0)
  def _() -> None:
    norm = jnp.broadcast_to(refs.sums[...].sum(axis=-1, keepdims=True), refs.sums.shape)
    refs.out[...] = (refs.total[...] / _widened(norm, refs.out.shape[-1])).astype(refs.out.dtype)
    refs.norms[...] = (refs.maxima[...] + jnp.log2(norm)).T[:1, :]


def _add_forward(sizes: Sizes, refs: _Forward, step: jax.Array, of_q: pl.Slice, of_k: pl.Slice, masked: bool) -> None:
  """Adds the keys at `of_k` of a block to the softmax of the queries at `of_q`."""
  scores = lax.dot_general(refs.q[of_q, :], refs.k[of_k, :], _BY_LAST, preferred_element_type=jnp.float32)
  if masked:
    q_start, k_start = _positions(sizes, refs.starts, step, of_q, of_k)
    scores = _hide(scores, q_start, k_start, _widened(refs.q_ids[of_q, :], of_k.size), refs.k_ids[:1, of_k], 0)
  before = refs.maxima[of_q, :]
  maximum = jnp.maximum(before, scores.max(axis=-1, keepdims=True))
  powers = jnp.exp2(scores - _widened(maximum, of_k.size))
  rescale = jnp.exp2(before - maximum)
  refs.maxima[of_q, :] = maximum
  summed = sum(powers[:, lane : lane + LANES] for lane in range(0, of_k.size, LANES))
  refs.sums[of_q, :] = refs.sums[of_q, :] * rescale + summed
  weighted = jnp.dot(powers.astype(refs.v.dtype), refs.v[of_k, :], preferred_element_type=jnp.float32)
  refs.total[of_q, :] = refs.total[of_q, :] * _widened(rescale, refs.total.shape[-1]) + weighted


def backward(
  sizes: Sizes, steps: Steps, arrays: Sequence[jax.Array], out: jax.Array, norms: jax.Array, dout: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns dq [B, N, T, H], dk and dv [B, K, S, H]."""
  q, k, v, q_ids, k_ids = arrays
  (batch, heads, length, width), kv_heads = q.shape, k.shape[1]
  group, chunks = heads // kv_heads, length // sizes.chunk
  rows_of_chunk = sizes.chunk // sizes.queries
  of_queries = lambda b, n, at, g, steps, *_: (b, n * group + g, steps_of.row(steps[at]), 0)
  of_written = lambda b, n, at, g, steps, written, *_: (
    b, n * group + steps_of.head_written(written[at], g, group), written[at] >> 2, 0
  )  # fmt: skip
  of_norms = lambda b, n, at, g, steps, *_: (b, n * group + g, 0, steps_of.row(steps[at]))
  of_keys = lambda b, n, at, g, steps, *_: (b, n, steps_of.column(steps[at]), 0)
  of_parts = lambda b, n, at, g, steps, *_: (
    lax.div(steps_of.row(steps[at]), jnp.int32(rows_of_chunk)), b, n, steps_of.column(steps[at]), 0
  )  # fmt: skip
  query_block, key_block = (None, None, sizes.queries, width), (None, None, sizes.keys, width)
  grid = pltpu.PrefetchScalarGridSpec(
    num_scalar_prefetch=5,
    grid=(batch, kv_heads, len(steps.backward), group),
    in_specs=[
      pl.BlockSpec(query_block, of_queries),
      pl.BlockSpec(key_block, of_keys),
      pl.BlockSpec(key_block, of_keys),
      pl.BlockSpec(query_block, of_queries),
      pl.BlockSpec((None, None, 1, sizes.queries), of_norms),
      pl.BlockSpec((None, None, 1, sizes.queries), of_norms),
      pl.BlockSpec((None, SUBLANES, sizes.queries), lambda b, n, at, g, steps, *_: (b, 0, steps_of.row(steps[at]))),
      pl.BlockSpec((None, sizes.keys, LANES), lambda b, n, at, g, steps, *_: (b, steps_of.column(steps[at]), 0)),
    ],
    out_specs=[pl.BlockSpec(query_block, of_written), *[pl.BlockSpec((None, *key_block), of_parts)] * 2],
    scratch_shapes=[
      pltpu.VMEM((group, sizes.chunk, width), jnp.float32),
      *[pltpu.VMEM((sizes.keys, width), jnp.float32)] * 2,
    ],
  )
  call = pl.pallas_call(
    functools.partial(_backward_kernel, sizes),
    grid_spec=grid,
    out_shape=[
      jax.ShapeDtypeStruct(q.shape, q.dtype),
      *[jax.ShapeDtypeStruct((chunks, *x.shape), x.dtype) for x in (k, v)],
    ],
    compiler_params=_parameters(sizes, dims=4),
    cost_estimate=_cost(sizes, 5, q, k),
    interpret=sizes.interpret,
    name="flash_attention_backward",
  )
  ranges = _ranges(q_ids, sizes.queries), _ranges(k_ids, sizes.keys)
  means = (out.astype(jnp.float32) * dout.astype(jnp.float32)).sum(-1)[:, :, None]
  lists = steps.backward, steps.written, steps.starts
  dq, *parts = call(*lists, *ranges, q, k, v, dout, norms, means, _on_lanes(q_ids), _on_sublanes(k_ids))
  # Added one by one: the TPU compiler estimates 13 times the cycles of additions for a sum over the first dim.
  dk, dv = (functools.reduce(operator.add, each.astype(jnp.float32)).astype(each.dtype) for each in parts)
  return dq, dk, dv


class _Backward(NamedTuple):
  """What the backward kernel reads and writes, in the order of its arguments."""

  steps: Any
  written: Any  # only the grid reads it
  starts: Any
  query_ranges: Any
  key_ranges: Any
  q: Any
  k: Any
  v: Any
  dout: Any
  norms: Any
  means: Any  # of the gradients of a query's exponentials, weighted by its probabilities: out dout'
  q_ids: Any  # equal on all sublanes
  k_ids: Any  # equal on all lanes
  dq: Any
  dk: Any
  dv: Any
  dq_total: Any  # float32 [G, chunk, H]
  dk_total: Any
  dv_total: Any


def _backward_kernel(sizes: Sizes, *given: Any) -> None:
  """Adds what one block of queries and one block of keys contribute to their gradients."""
  refs = _Backward(*given)
  step, head = refs.steps[pl.program_id(2)], pl.program_id(3)
  row = lax.rem(steps_of.row(step), jnp.int32(sizes.chunk // sizes.queries)) * sizes.queries
  rows = pl.ds(pl.multiple_of(row, LANES), sizes.queries)

  @pl.when((step & steps_of.FIRST != 0) & (head == 0))
  def _() -> None:
    refs.dk_total[...] = jnp.zeros_like(refs.dk_total)
    refs.dv_total[...] = jnp.zeros_like(refs.dv_total)

  @pl.when(step & steps_of.FIRST_OF_QUERIES != 0)
  def _() -> None:
    refs.dq_total[head, rows, :] = jnp.zeros(refs.q.shape, jnp.float32)

  def compute(masked: bool) -> None:
    size_q, size_k = (largest_block(size, steps_of.TILE) for size in (sizes.queries, sizes.keys))
    tiles = list(itertools.product(range(0, sizes.queries, size_q), range(0, sizes.keys, size_k)))
    # No query sees these tiles if the block is on the diagonal.
    above = [(first_q, first_k) for first_q, first_k in tiles if masked and first_k >= first_q + size_q]
    add = lambda q, k: _add_backward(sizes, refs, step, (head, row), pl.ds(q, size_q), pl.ds(k, size_k), masked)
    for tile in tiles:
      if tile not in above:
        add(*tile)
    for first_q, first_k in above:
      seen = _sees(sizes, refs.starts, step, first_q + size_q, first_k)
      pl.when(seen)(functools.partial(add, first_q, first_k))

  _when_visible(step, refs, compute)

  # The derivative of the exponentials in base 2 gives ln 2, and the scale of the queries gives the rest.
  @pl.when(step & steps_of.LAST_OF_QUERIES != 0)
  def _() -> None:
    refs.dq[...] = (refs.dq_total[head, rows, :] * math.log(2)).astype(refs.dq.dtype)

  @pl.when((step & steps_of.LAST != 0) & (head == pl.num_programs(3) - 1))
  def _() -> None:
    refs.dk[...] = (refs.dk_total[...] * math.log(2)).astype(refs.dk.dtype)
    refs.dv[...] = refs.dv_total[...].astype(refs.dv.dtype)


def _add_backward(
  sizes: Sizes, refs: _Backward, step: jax.Array, first: tuple[Any, Any], of_q: pl.Slice, of_k: pl.Slice, masked: bool
) -> None:
  """Adds the gradients of one tile. first: place of the first query of the block in dq_total, a head and a row.

  The scores have the dims (keys, queries), so that the numbers of a query are in a row of lanes.
  """
  q, k, v, dout = refs.q[of_q, :], refs.k[of_k, :], refs.v[of_k, :], refs.dout[of_q, :]
  scores = lax.dot_general(k, q, _BY_LAST, preferred_element_type=jnp.float32)
  if masked:
    q_start, k_start = _positions(sizes, refs.starts, step, of_q, of_k)
    scores = _hide(scores, q_start, k_start, refs.q_ids[:1, of_q], _widened(refs.k_ids[of_k, :], of_q.size), 1)
  shares = jnp.exp2(scores - refs.norms[:, of_q])
  dshares = lax.dot_general(v, dout, _BY_LAST, preferred_element_type=jnp.float32)
  dscores = (shares * (dshares - refs.means[:, of_q])).astype(q.dtype)
  refs.dv_total[of_k, :] += jnp.dot(shares.astype(dout.dtype), dout, preferred_element_type=jnp.float32)
  refs.dk_total[of_k, :] += jnp.dot(dscores, q, preferred_element_type=jnp.float32)
  head, row = first
  at = pl.ds(pl.multiple_of(row + of_q.start, LANES), of_q.size)
  refs.dq_total[head, at, :] += jnp.dot(dscores.T, k, preferred_element_type=jnp.float32)
