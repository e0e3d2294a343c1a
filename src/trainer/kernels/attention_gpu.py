"""Flash attention for GPUs: cuDNN's fused kernel, called on the heads and queries of each device.

cuDNN has a causal mask, but supports segments only through a mask that is added to the scores. Whether a batch is
packed is known only at run time. A batch without packing uses the causal kernel. A packed batch uses the same kernel
with a mask of [B, 1, T, S] in the compute dtype: the only array that is not linear in the length. The mask is not saved
for the backward pass. Only one of the two branches runs. The backward pass runs the forward kernel again, because JAX
does not pass the residuals of cuDNN, which differ between the branches, to a custom gradient.

The tests check the lowered program, and the same calls in plain XLA. On an H200 (docs/benchmarks/accelerator.md) output
and gradients were within 0.4% of attention by definition in float32: the rounding of bfloat16.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh

from trainer.config.errors import ConfigError
from trainer.kernels.attention_shard import per_device
from trainer.parallel.mesh import CONTEXT

Implementation = Literal["cudnn", "xla"]
MAX_HEAD_DIM = 256  # before Hopper 128, which cuDNN itself checks


def build(
  *, mesh: Mesh | None, head_dim: int, seq_len: int, dtype: jnp.dtype, implementation: Implementation = "cudnn"
) -> Callable[..., jax.Array]:
  """Returns a function with the contract of `attention.Attention`, for q, k and v of a 16-bit `dtype`.

  Raises ConfigError if cuDNN does not support the type or the sizes. `implementation="xla"` is for tests: it computes
  the same calls in plain XLA on any platform.
  """
  if dtype not in (jnp.bfloat16, jnp.float16):
    raise ConfigError(
      f"dtype={jnp.dtype(dtype)}: the flash kernel of GPUs needs a 16-bit type. Set dtype=bfloat16, or "
      "attention=dot_product."
    )
  if head_dim % 8 or head_dim > MAX_HEAD_DIM:
    raise ConfigError(
      f"head_dim={head_dim}: the flash kernel of GPUs needs a multiple of 8, at most {MAX_HEAD_DIM}. Set one, or "
      "attention=dot_product."
    )
  if seq_len % 2:
    raise ConfigError(
      f"max_target_length={seq_len}: the flash kernel of GPUs needs an even length. Set one, or attention=dot_product."
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
  """Returns attention of q [B, T, N, H], at the positions from `first` on, to all S keys in k and v [B, S, K, H]."""
  return _masked_or_causal(_call, (q, k, v), (q_segment_ids, kv_segment_ids, first), implementation)


def _flash_fwd(*arguments: Any) -> tuple[jax.Array, tuple[jax.Array, ...]]:
  return checkpoint_name(_flash(*arguments), "context"), arguments[:6]


def _flash_bwd(
  implementation: Implementation, residuals: tuple[jax.Array, ...], dout: jax.Array
) -> tuple[jax.Array | None, ...]:
  def pull(
    mask: jax.Array | None, causal: bool, implementation: Implementation, dout: jax.Array, *qkv: jax.Array
  ) -> tuple[jax.Array, ...]:
    return jax.vjp(functools.partial(_call, mask, causal, implementation), *qkv)[1](dout)

  return *_masked_or_causal(pull, (dout, *residuals[:3]), residuals[3:], implementation), None, None, None


_flash.defvjp(_flash_fwd, _flash_bwd)


def _call(
  mask: jax.Array | None, causal: bool, implementation: Implementation, q: jax.Array, k: jax.Array, v: jax.Array
) -> jax.Array:
  return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=causal, implementation=implementation)


def _masked_or_causal(
  function: Callable[..., Any],
  arrays: tuple[jax.Array, ...],
  place: tuple[jax.Array, jax.Array, jax.Array],
  implementation: Implementation,
) -> Any:
  """Returns function(mask, causal, implementation, *arrays), with mask=None if no row of the batch is packed."""
  q_segment_ids, kv_segment_ids, first = place
  t, s = q_segment_ids.shape[1], kv_segment_ids.shape[1]

  def masked(*arrays: jax.Array) -> Any:
    seen = q_segment_ids[:, :, None] == kv_segment_ids[:, None, :]
    if t != s:  # a shard of the sequence, but the causal mask of cuDNN begins at position 0
      seen = seen & (jnp.arange(s)[None, :] <= first + jnp.arange(t)[:, None])
    return function(seen[:, None], t == s, implementation, *arrays)

  if t != s:
    return masked(*arrays)
  packed = jnp.any(q_segment_ids != q_segment_ids[:, :1])
  return jax.lax.cond(packed, masked, functools.partial(function, None, True, implementation), *arrays)
