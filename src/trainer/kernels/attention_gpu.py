"""Flash attention for GPUs: cuDNN's fused kernel, called on each device's own heads and queries.

cuDNN has a causal mask of its own but knows segments only as a mask added to the scores. So a batch without packing,
which is known only when the program runs, takes the causal kernel; a packed one takes the same kernel with a mask of
[B, 1, T, S] in the compute dtype, the one array that is not linear in the length, and not kept for the backward pass.
Only the branch taken runs. The backward pass runs the forward kernel again: JAX offers cuDNN's residuals, which differ
between the branches, to no custom gradient.

Not run on a GPU yet: what is tested is the program that it lowers to, and the same calls in plain XLA.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh

from trainer.kernels.attention_shard import CONTEXT, per_device

Implementation = Literal["cudnn", "xla"]
LARGEST_HEAD = 256  # 128 before Hopper; cuDNN itself refuses it there


def build(
  *, mesh: Mesh | None, head_dim: int, seq_len: int, dtype: jnp.dtype, implementation: Implementation = "cudnn"
) -> Callable[..., jax.Array]:
  """Returns attention of the contract of `attention.Attention` for q, k and v of a 16-bit `dtype`.

  Raises ValueError where cuDNN cannot serve the type or the sizes. `implementation="xla"` computes the same calls in
  plain XLA, on any platform, for tests.
  """
  if dtype not in (jnp.bfloat16, jnp.float16):
    raise ValueError(
      f"dtype={jnp.dtype(dtype)}: the flash kernel of GPUs computes in 16 bits; choose dtype=bfloat16, or "
      "attention=dot_product."
    )
  if head_dim % 8 or head_dim > LARGEST_HEAD:
    raise ValueError(
      f"head_dim={head_dim}: the flash kernel of GPUs needs a multiple of 8 up to {LARGEST_HEAD}; choose one, or "
      "attention=dot_product."
    )
  if seq_len % 2:
    raise ValueError(
      f"max_target_length={seq_len}: the flash kernel of GPUs needs an even length; choose one, or "
      "attention=dot_product."
    )

  if mesh is None or mesh.size == 1:
    return lambda *arrays: _flash(*arrays, jnp.int32(0), implementation)

  def local(_: None, q: jax.Array, k: jax.Array, *rest: jax.Array) -> jax.Array:
    first = jnp.int32(0) if q.shape[1] == k.shape[1] else jax.lax.axis_index(CONTEXT) * q.shape[1]
    return _flash(q, k, *rest, first, implementation)

  return per_device(local, mesh)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _flash(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  q_segment_ids: jax.Array,
  kv_segment_ids: jax.Array,
  first: jax.Array,
  implementation: Implementation,
) -> jax.Array:
  """q [B, T, N, H] at positions first.., k and v [B, S, K, H] with all S keys, segment ids [B, T] and [B, S]."""
  return _either(_call, (q, k, v), (q_segment_ids, kv_segment_ids, first), implementation)


def _flash_fwd(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  q_segment_ids: jax.Array,
  kv_segment_ids: jax.Array,
  first: jax.Array,
  implementation: Implementation,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
  out = _flash(q, k, v, q_segment_ids, kv_segment_ids, first, implementation)
  return checkpoint_name(out, "context"), (q, k, v, q_segment_ids, kv_segment_ids, first)


def _flash_bwd(
  implementation: Implementation, residuals: tuple[jax.Array, ...], dout: jax.Array
) -> tuple[jax.Array | None, ...]:
  def pull(
    mask: jax.Array | None, causal: bool, implementation: Implementation, dout: jax.Array, *qkv: jax.Array
  ) -> tuple[jax.Array, ...]:
    return jax.vjp(functools.partial(_call, mask, causal, implementation), *qkv)[1](dout)

  return *_either(pull, (dout, *residuals[:3]), residuals[3:], implementation), None, None, None


_flash.defvjp(_flash_fwd, _flash_bwd)


def _call(
  mask: jax.Array | None, causal: bool, implementation: Implementation, q: jax.Array, k: jax.Array, v: jax.Array
) -> jax.Array:
  return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=causal, implementation=implementation)


def _either(
  function: Callable[..., Any],
  arrays: tuple[jax.Array, ...],
  place: tuple[jax.Array, jax.Array, jax.Array],
  implementation: Implementation,
) -> Any:
  """Returns function(mask, causal, implementation, *arrays), without a mask where the batch at hand needs none."""
  q_segment_ids, kv_segment_ids, first = place
  t, s = q_segment_ids.shape[1], kv_segment_ids.shape[1]

  def masked(*arrays: jax.Array) -> Any:
    seen = q_segment_ids[:, :, None] == kv_segment_ids[:, None, :]
    if t != s:  # cuDNN's causal mask begins at position 0
      seen = seen & (jnp.arange(s)[None, :] <= first + jnp.arange(t)[:, None])
    return function(seen[:, None], t == s, implementation, *arrays)

  if t != s:
    return masked(*arrays)
  packed = jnp.any(q_segment_ids != q_segment_ids[:, :1])
  return jax.lax.cond(packed, masked, functools.partial(function, None, True, implementation), *arrays)
