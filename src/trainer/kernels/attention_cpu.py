"""Flash attention for CPUs: one block of queries at a time against the keys that it may see.

XLA's dot is fast on a CPU and everything between two dots is a pass over memory, so a block is chosen such that its
scores stay in the cache and the loop is over blocks of queries alone: each sees all of its keys at once, no online
rescaling is needed, and the blocks above the diagonal are never computed. FlashAttention's backward (Dao 2022,
section 3.1): scores are recomputed from the saved log-sum-exp.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

MASKED = float(jnp.finfo(jnp.float32).min)


def flash(
  q: jax.Array, k: jax.Array, v: jax.Array, q_segment_ids: jax.Array, kv_segment_ids: jax.Array, *, block: int = 128
) -> jax.Array:
  """Returns what `attention_xla.dot_product` returns, for T = S, with memory linear in T in both passes."""
  if q.shape[1] != k.shape[1]:
    raise ValueError(f"CPU flash attention is self-attention: query length {q.shape[1]}, key length {k.shape[1]}.")
  return _flash(q, k, v, q_segment_ids, kv_segment_ids, min(block, q.shape[1]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _flash(
  q: jax.Array, k: jax.Array, v: jax.Array, q_segment_ids: jax.Array, kv_segment_ids: jax.Array, block: int
) -> jax.Array:
  return _forward(q, k, v, q_segment_ids, kv_segment_ids, block)[0]


def _group(x: jax.Array, kv_heads: int) -> jax.Array:
  """[B, T, N, H] -> [B, K, G, T, H]."""
  b, t, n, h = x.shape
  return jnp.transpose(x.reshape(b, t, kv_heads, n // kv_heads, h), (0, 2, 3, 1, 4))


def _ungroup(x: jax.Array) -> jax.Array:
  """[B, K, G, T, H] -> [B, T, N, H]."""
  b, kv_heads, g, t, h = x.shape
  return jnp.transpose(x, (0, 3, 1, 2, 4)).reshape(b, t, kv_heads * g, h)


def _scores(q: jax.Array, k: jax.Array, q_segment_ids: jax.Array, kv_segment_ids: jax.Array, start: int) -> jax.Array:
  """Masked float32 scores [B, K, G, t, s] of the queries start.. against the keys 0.."""
  scores = jnp.einsum("bkgth,bksh->bkgts", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
  causal = (jnp.arange(q.shape[3]) + start)[:, None] >= jnp.arange(k.shape[2])[None, :]
  same = q_segment_ids[:, :, None] == kv_segment_ids[:, None, :]
  return jnp.where((causal & same)[:, None, None], scores, MASKED)


def _forward(
  q: jax.Array, k: jax.Array, v: jax.Array, q_segment_ids: jax.Array, kv_segment_ids: jax.Array, block: int
) -> tuple[jax.Array, jax.Array]:
  """Returns the output [B, T, N, H] and the log-sum-exp of the scores [B, K, G, T] in float32."""
  length, kv_heads = q.shape[1], k.shape[2]
  grouped = _group(q, kv_heads)
  k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
  outs, sums = [], []
  for start in range(0, length, block):
    end = min(start + block, length)
    scores = _scores(
      grouped[..., start:end, :], k[:, :, :end], q_segment_ids[:, start:end], kv_segment_ids[:, :end], start
    )
    largest = jnp.max(scores, axis=-1, keepdims=True)
    exponents = jnp.exp(scores - largest)
    total = jnp.sum(exponents, axis=-1, keepdims=True)
    out = jnp.einsum("bkgts,bksh->bkgth", exponents.astype(v.dtype), v[:, :, :end], preferred_element_type=jnp.float32)
    outs.append((out / total).astype(q.dtype))
    sums.append((jnp.log(total) + largest)[..., 0])
  return _ungroup(jnp.concatenate(outs, axis=3)), jnp.concatenate(sums, axis=3)


def _flash_fwd(
  q: jax.Array, k: jax.Array, v: jax.Array, q_segment_ids: jax.Array, kv_segment_ids: jax.Array, block: int
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
  out, log_sum = _forward(q, k, v, q_segment_ids, kv_segment_ids, block)
  # Both under the name of the output: with it saved, a remat policy recomputes nothing of the forward pass.
  out, log_sum = checkpoint_name(out, "context"), checkpoint_name(log_sum, "context")
  return out, (q, k, v, q_segment_ids, kv_segment_ids, out, log_sum)


def _flash_bwd(
  block: int, residuals: tuple[jax.Array, ...], dout: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None, None]:
  q, k, v, q_segment_ids, kv_segment_ids, out, log_sum = residuals
  length, kv_heads, scale = q.shape[1], k.shape[2], q.shape[-1] ** -0.5
  # Row sums of dP * P, from the output: no pass over scores.
  delta = jnp.einsum("btnh,btnh->btn", dout, out, preferred_element_type=jnp.float32)
  delta = _group(delta[..., None], kv_heads)
  grouped, dgrouped = _group(q, kv_heads), _group(dout, kv_heads)
  keys, values = k.swapaxes(1, 2), v.swapaxes(1, 2)
  dqs = []
  dk = jnp.zeros(keys.shape, jnp.float32)
  dv = jnp.zeros(values.shape, jnp.float32)
  for start in range(0, length, block):
    end = min(start + block, length)
    q_block, d_block = grouped[..., start:end, :], dgrouped[..., start:end, :]
    k_block, v_block = keys[:, :, :end], values[:, :, :end]
    scores = _scores(q_block, k_block, q_segment_ids[:, start:end], kv_segment_ids[:, :end], start)
    p = jnp.exp(scores - log_sum[..., start:end, None])
    dp = jnp.einsum("bkgth,bksh->bkgts", d_block, v_block, preferred_element_type=jnp.float32)
    ds = (p * (dp - delta[..., start:end, :]) * scale).astype(q.dtype)
    p = p.astype(q.dtype)
    dqs.append(jnp.einsum("bkgts,bksh->bkgth", ds, k_block, preferred_element_type=jnp.float32).astype(q.dtype))
    dk = dk.at[:, :, :end].add(jnp.einsum("bkgts,bkgth->bksh", ds, q_block, preferred_element_type=jnp.float32))
    dv = dv.at[:, :, :end].add(jnp.einsum("bkgts,bkgth->bksh", p, d_block, preferred_element_type=jnp.float32))
  dq = _ungroup(jnp.concatenate(dqs, axis=3))
  return dq, dk.swapaxes(1, 2).astype(k.dtype), dv.swapaxes(1, 2).astype(v.dtype), None, None


_flash.defvjp(_flash_fwd, _flash_bwd)
