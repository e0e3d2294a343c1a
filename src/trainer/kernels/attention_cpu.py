"""Flash attention for CPUs: computes one block of queries at a time against the keys that it may see.

On a CPU matmuls are fast and passes over memory are slow. The scores of a block must stay in the cache, and the next
block must reuse the same buffers. Hence loops instead of batched operations: one iteration handles one block of queries
of one example against all of its keys, so no online rescaling is needed.

Blocks form at most four bands. The keys of a band end with its last query. This length is static, so nothing above the
diagonal is computed except inside the band. Each band costs half a second of compilation. Short sequences use two bands
of one large block each: there this is almost as fast as four bands, but for long sequences it is much slower.

Scores are stored transposed, [keys, queries]: matmuls with them are then row-major, and sums over keys run along the
slow dim. XLA's fast matmul needs a left operand with the contracted dim last, so `work` also holds keys and values with
the positions last. With the left operand [keys, H] instead, two of the seven matmuls took twice as long.

The backward pass recomputes scores from the saved log-sum-exp (FlashAttention, Dao et al. 2022, section 3.1). All
arithmetic is float32, because XLA's bfloat16 matmuls on a CPU are slower than casting.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from trainer.parallel.mesh import CONTEXT

MASKED = float(jnp.finfo(jnp.float32).min)
SHORT = 512  # up to this many positions there are at most two blocks
BLOCK = 128  # positions of a block of a longer sequence
SMALLEST_BLOCK = 32
BANDS = 4


def flash(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  q_segment_ids: jax.Array,
  kv_segment_ids: jax.Array,
  offset: jax.Array | None = None,
) -> jax.Array:
  """Returns what `attention_xla.dot_product` returns. Both passes use memory linear in the length.

  `offset` (int32 scalar) is for a shard of a sequence: q holds the positions from `offset` on, and k and v hold all S
  keys. Then every key is computed and masked. Without `offset`, T must equal S.
  """
  length = q.shape[1]
  square = offset is None
  if square and length != k.shape[1]:
    raise ValueError(f"Without an offset, query length {length} must equal key length {k.shape[1]}.")
  blocks = min(2, -(-length // SMALLEST_BLOCK)) if k.shape[1] <= SHORT else -(-length // BLOCK)
  block = -(-length // (8 * blocks)) * 8
  pad = -length % block
  if pad:
    # Padded keys follow every query, so the causal mask hides them. The rows of padded queries are removed below.
    q, q_segment_ids = _pad(q, pad), _pad(q_segment_ids, pad)
    if square:
      k, v, kv_segment_ids = _pad(k, pad), _pad(v, pad), _pad(kv_segment_ids, pad)
  out = _flash(_Operands(q, k, v, q_segment_ids, kv_segment_ids, offset), block)
  return out[:, :length] if pad else out


def flash_shard(
  q: jax.Array, k: jax.Array, v: jax.Array, q_segment_ids: jax.Array, kv_segment_ids: jax.Array
) -> jax.Array:
  """Returns `flash` for the queries of one device, inside `jax.shard_map`; k and v hold all keys."""
  whole = q.shape[1] == k.shape[1]
  offset = None if whole else jax.lax.axis_index(CONTEXT) * q.shape[1]
  return flash(q, k, v, q_segment_ids, kv_segment_ids, offset)


def _pad(x: jax.Array, pad: int) -> jax.Array:
  return jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))


class _Operands(NamedTuple):
  """The operands of attention: q [B, T, N, H], k and v [B, S, K, H], segment ids [B, T] and [B, S]."""

  q: jax.Array
  k: jax.Array
  v: jax.Array
  q_segment_ids: jax.Array
  kv_segment_ids: jax.Array
  offset: jax.Array | None


class _Work(NamedTuple):
  """The operands in float32 and in the layout of the loops: scaled q [B, K, G, T, H], k and v [B, K, S, H].

  The forward pass also needs v with the positions last, [B, K, H, S], and the backward pass needs k in this layout.
  """

  q: jax.Array
  k: jax.Array
  v: jax.Array
  positions_last: jax.Array
  q_segment_ids: jax.Array
  kv_segment_ids: jax.Array
  offset: jax.Array | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _flash(given: _Operands, block: int) -> jax.Array:
  return _flash_fwd(given, block)[0]


def _flash_fwd(given: _Operands, block: int) -> tuple[jax.Array, tuple[_Operands, jax.Array, jax.Array]]:
  work = _to_loop_layout(given, given.v)
  out, log_sum = jnp.zeros_like(work.q), jnp.zeros(work.q.shape[:4], jnp.float32)
  for band in _bands(given, block):
    out, log_sum = _forward_band(band, work, out, log_sum)
  # Name both "context": a remat policy that saves it then recomputes nothing of the forward pass.
  out, log_sum = checkpoint_name(_ungroup(out).astype(given.q.dtype), "context"), checkpoint_name(log_sum, "context")
  return out, (given, out, log_sum)


def _flash_bwd(
  block: int, residuals: tuple[_Operands, jax.Array, jax.Array], dout: jax.Array
) -> tuple[tuple[jax.Array | None, ...]]:
  given, out, log_sum = residuals
  q, k, v = given.q, given.k, given.v
  work = _to_loop_layout(given, given.k)
  dout = dout.astype(jnp.float32)
  # The sum over keys of P * dP, computed from the output without a pass over the scores.
  delta = _group(jnp.sum(dout * out.astype(jnp.float32), axis=-1), k.shape[2])
  douts = _group(dout, k.shape[2])
  dq, dk, dv = jnp.zeros_like(work.q), jnp.zeros_like(work.k), jnp.zeros_like(work.v)
  for band in _bands(given, block):
    dq, dk, dv = _backward_band(band, work, (douts, log_sum, delta), (dq, dk, dv))
  dq = _ungroup(dq * q.shape[-1] ** -0.5).astype(q.dtype)
  dk, dv = dk.swapaxes(1, 2).astype(k.dtype), dv.swapaxes(1, 2).astype(v.dtype)
  return (given._replace(q=dq, k=dk, v=dv, q_segment_ids=None, kv_segment_ids=None, offset=None),)


_flash.defvjp(_flash_fwd, _flash_bwd)


class _Band(NamedTuple):
  """Query blocks first .. first + blocks - 1. They see the keys 0 .. keys - 1."""

  first: int
  blocks: int
  keys: int
  block: int

  def place(self, i: jax.Array) -> tuple[jax.Array, jax.Array | int]:
    """Returns (example, first query) of iteration i. A static value is a Python number and costs no operation."""
    if self.blocks == 1:
      return i, self.first * self.block
    # lax.div and lax.rem, because // and % add code for negative numbers to the body of every loop.
    return jax.lax.div(i, self.blocks), (self.first + jax.lax.rem(i, self.blocks)) * self.block


def _to_loop_layout(given: _Operands, positions_last: jax.Array) -> _Work:
  q, k, v, *masks = given
  scaled = _group(q.astype(jnp.float32) * q.shape[-1] ** -0.5, k.shape[2])
  k, v = (x.swapaxes(1, 2).astype(jnp.float32) for x in (k, v))
  positions_last = jnp.moveaxis(positions_last, 1, -1).astype(jnp.float32)
  # The barrier makes the inputs of the masks depend on the queries. Without it JAX moves the masks of all blocks, which
  # are the same in every layer, out of the loop over layers: [B, N, T, T] bytes that every block reads again.
  return jax.lax.optimization_barrier(_Work(scaled, k, v, positions_last, *masks))


def _group(x: jax.Array, kv_heads: int) -> jax.Array:
  """[B, T, N, ...] -> [B, K, G, T, ...], with G = N / K query heads per key head."""
  return jnp.moveaxis(x.reshape(*x.shape[:2], kv_heads, -1, *x.shape[3:]), 1, 3)


def _ungroup(x: jax.Array) -> jax.Array:
  """[B, K, G, T, H] -> [B, T, N, H]."""
  b, kv_heads, g, t, h = x.shape
  return jnp.moveaxis(x, 3, 1).reshape(b, t, kv_heads * g, h)


def _bands(given: _Operands, block: int) -> Iterator[_Band]:
  blocks, keys = given.q.shape[1] // block, given.k.shape[1]
  if given.offset is not None:
    yield _Band(0, blocks, keys, block)
    return
  bands = min(blocks, BANDS)
  edges = [i * blocks // bands for i in range(bands + 1)]
  for first, last in itertools.pairwise(edges):
    yield _Band(first, last - first, last * block, block)


def _slice(x: jax.Array, example: jax.Array, axis: int, start: jax.Array | int, size: int) -> jax.Array:
  """Returns x[example, ..., start : start + size, ...], with the slice on dim `axis` of x."""
  starts = [example if i == 0 else (start if i == axis else 0) for i in range(x.ndim)]
  sizes = [1 if i == 0 else (size if i == axis else n) for i, n in enumerate(x.shape)]
  return jax.lax.squeeze(jax.lax.dynamic_slice(x, starts, sizes, allow_negative_indices=False), (0,))


def _store(x: jax.Array, part: jax.Array, example: jax.Array, axis: int, start: jax.Array | int) -> jax.Array:
  """Returns x with `part` written where `_slice` reads."""
  starts = [example if i == 0 else (start if i == axis else 0) for i in range(x.ndim)]
  return jax.lax.dynamic_update_slice(x, part[None], starts, allow_negative_indices=False)


def _scores(work: _Work, band: _Band, example: jax.Array, start: jax.Array | int) -> tuple[jax.Array, jax.Array]:
  """Returns the masked scores [K, s, G, t] of one block and its queries [K, G * t, H]."""
  q, k = _rows(work.q, band, example, start), _slice(work.k, example, 2, 0, band.keys)
  q_ids = _slice(work.q_segment_ids, example, 1, start, band.block)
  kv_ids = _slice(work.kv_segment_ids, example, 1, 0, band.keys)
  # Without the barrier XLA moves loop-invariant values out of the loop, and each iteration reads them from memory.
  scores, masked = jax.lax.optimization_barrier((_split(jnp.einsum("ksh,kxh->ksx", k, q), band), jnp.float32(MASKED)))
  queries = start + np.arange(band.block, dtype=np.int32)
  if work.offset is not None:
    queries += work.offset
  causal = np.arange(band.keys, dtype=np.int32)[:, None] <= queries
  seen = causal & (kv_ids[:, None] == q_ids[None, :])
  # A finite value is enough, because every query sees at least its own key. Infinity could give a NaN.
  return jnp.where(seen[None, :, None, :], scores, masked), q


def _rows(x: jax.Array, band: _Band, example: jax.Array, start: jax.Array | int) -> jax.Array:
  """Returns the queries of one block, [K, G * t, H], from x [B, K, G, T, H]."""
  part = _slice(x, example, 3, start, band.block)
  return part.reshape(part.shape[0], -1, part.shape[-1])


# Matmuls have one dim for all queries, because XLA copies operands with more dims. Elementwise operations have two dims
# [G, t], because a mask of [t] in a loop over G * t would need a division for each element.


def _split(x: jax.Array, band: _Band) -> jax.Array:
  """Returns x [K, ..., G * t] as [K, ..., G, t]."""
  return x.reshape(*x.shape[:-1], -1, band.block)


def _join(x: jax.Array) -> jax.Array:
  """Returns x [K, s, G, t] as [K, s, G * t]."""
  return x.reshape(*x.shape[:2], -1)


def _forward_band(band: _Band, work: _Work, out: jax.Array, log_sum: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns out [B, K, G, T, H] and log_sum [B, K, G, T] with the rows of this band filled in."""

  def one(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    out, log_sum = carry
    example, start = band.place(i)
    scores, _ = _scores(work, band, example, start)
    v = _slice(work.positions_last, example, 3, 0, band.keys)
    largest = jnp.max(scores, axis=1, keepdims=True)
    exponents = jnp.exp(scores - largest)
    total = jnp.sum(exponents, axis=1, keepdims=True)
    rows = jnp.moveaxis(_split(jnp.einsum("khs,ksx->khx", v, _join(exponents)), band) / total, 1, -1)
    sums = (jnp.log(total) + largest)[:, 0]
    return _store(out, rows, example, 3, start), _store(log_sum, sums, example, 3, start)

  return _loop(out.shape[0] * band.blocks, one, (out, log_sum))


def _backward_band(
  band: _Band, work: _Work, rows: tuple[jax.Array, jax.Array, jax.Array], grads: tuple[jax.Array, jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns `grads` plus the part of this band.

  grads: dq [B, K, G, T, H] of the scaled queries, dk and dv [B, K, S, H]. rows: dout [B, K, G, T, H], the log-sum-exp
  and delta [B, K, G, T].
  """
  dout, log_sum, delta = rows

  def one(i: jax.Array, grads: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
    dq, dk, dv = grads
    example, start = band.place(i)
    scores, q = _scores(work, band, example, start)
    v, d = _slice(work.v, example, 2, 0, band.keys), _rows(dout, band, example, start)
    p = jnp.exp(scores - _slice(log_sum, example, 3, start, band.block)[:, None])
    dp = _split(jnp.einsum("ksh,kxh->ksx", v, d), band)
    ds = _join(p * (dp - _slice(delta, example, 3, start, band.block)[:, None]))
    p = _join(p)
    k = _slice(work.positions_last, example, 3, 0, band.keys)
    dq_rows = _split(jnp.einsum("khs,ksx->khx", k, ds), band)
    dq = _store(dq, jnp.moveaxis(dq_rows, 1, -1), example, 3, start)
    dk_sum = _slice(dk, example, 2, 0, band.keys) + jnp.einsum("ksx,kxh->ksh", ds, q)
    dv_sum = _slice(dv, example, 2, 0, band.keys) + jnp.einsum("ksx,kxh->ksh", p, d)
    return dq, _store(dk, dk_sum, example, 2, 0), _store(dv, dv_sum, example, 2, 0)

  return _loop(dout.shape[0] * band.blocks, one, grads)


def _loop(count: int, one: Callable[[jax.Array, Any], Any], carry: Any) -> Any:
  """Returns the carry after `one(i, carry)` for i = 0 .. count - 1.

  A scan, because from a `fori_loop` JAX would split off a second loop for values that depend on the index alone.
  """
  return jax.lax.scan(lambda carry, i: (one(i, carry), None), carry, np.arange(count, dtype=np.int32))[0]
