"""Plain attention in XLA: the oracle for every other kernel, and the fallback if no flash kernel supports a shape."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name


def dot_product(
  q: jax.Array, k: jax.Array, v: jax.Array, q_segment_ids: jax.Array, kv_segment_ids: jax.Array
) -> jax.Array:
  """Returns causal, segment-masked attention [B, T, N, H] in q.dtype, by the textbook formula.

  q [B, T, N, H]; k, v [B, S, K, H] with N a multiple of K; segment ids [B, T] and [B, S] int32. Position t sees the
  positions s <= t of its segment. The softmax is always float32. Scores [B, N, T, S] are saved for the backward pass.
  The output is named "context" for remat.
  """
  b, t, n, h = q.shape
  s, kv_heads = k.shape[1], k.shape[2]
  assert n % kv_heads == 0, f"{n} query heads do not divide into {kv_heads} key heads"
  grouped = q.reshape(b, t, kv_heads, n // kv_heads, h)
  scores = jnp.einsum("btkgh,bskh->bkgts", grouped, k, preferred_element_type=jnp.float32) * h**-0.5
  causal = jnp.arange(t)[:, None] >= jnp.arange(s)[None, :]
  same = q_segment_ids[:, :, None] == kv_segment_ids[:, None, :]
  # A finite value is enough, because every query sees at least its own key. Infinity could give a NaN.
  scores = jnp.where((causal & same)[:, None, None], scores, jnp.finfo(jnp.float32).min)
  probabilities = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
  out = jnp.einsum("bkgts,bskh->btkgh", probabilities, v, preferred_element_type=jnp.float32)
  return checkpoint_name(out.reshape(b, t, n, h).astype(q.dtype), "context")
