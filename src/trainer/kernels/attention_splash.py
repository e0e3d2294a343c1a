"""Flash attention for TPUs: JAX's Pallas "splash" kernel, called on each device's own heads and queries.

Blocks that the causal mask empties are not computed; the mask of the others is made inside the kernel from positions,
so nothing of size T * S exists. Keys and values are not repeated for grouped queries: the kernel maps a query head to
its key head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer.kernels.attention_shard import CONTEXT, TENSOR, per_device

LANES = 128


def build(*, mesh: Mesh | None, seq_len: int, num_q_heads: int, interpret: bool = False) -> Callable[..., jax.Array]:
  """Returns attention for sequences of exactly `seq_len` (the contract of `attention.Attention`).

  Raises ValueError where a device's part of the sequence is not a multiple of 128.
  `interpret` runs the kernel on any platform, slowly, for tests.
  """
  context, tensor = (1, 1) if mesh is None else (mesh.shape[CONTEXT], mesh.shape[TENSOR])
  if seq_len % (LANES * context):
    raise ValueError(
      f"max_target_length={seq_len} over context parallelism {context} gives a TPU {seq_len / context:g} positions, "
      f"and its flash kernel needs a multiple of {LANES}: choose a multiple of {LANES * context}, or "
      "attention=dot_product."
    )
  mask = masks.MultiHeadMask([masks.CausalMask((seq_len, seq_len), shard_count=context)] * (num_q_heads // tensor))
  with jax.ensure_compile_time_eval():
    kernel = kernels.make_splash_mha(
      mask,
      head_shards=1,
      q_seq_shards=context,
      block_sizes=block_sizes(seq_len // context, seq_len),
      residual_checkpoint_name="context",
      interpret=interpret,
    )
  # Constants of the program, on no device yet: the kernel may be built before, and for, another backend.
  kernel = jax.tree.map(np.asarray, kernel)
  if mesh is None or mesh.size == 1:
    return lambda *arrays: _local(kernel, *arrays)
  specs = kernel.manual_sharding_spec(NamedSharding(mesh, PartitionSpec(None, CONTEXT)))
  return per_device(_local, mesh, kernel, specs)


def _local(
  kernel: Any, q: jax.Array, k: jax.Array, v: jax.Array, q_segment_ids: jax.Array, kv_segment_ids: jax.Array
) -> jax.Array:
  """Local shapes: q [B, T, N, H], k and v [B, S, K, H] with all S keys, segment ids [B, T] and [B, S]."""
  scaled = (q * q.shape[-1] ** -0.5).astype(q.dtype)
  scaled, k, v = (x.swapaxes(1, 2) for x in (scaled, k, v))
  out = jax.vmap(kernel)(scaled, k, v, kernels.SegmentIds(q_segment_ids, kv_segment_ids))
  return out.swapaxes(1, 2)


def block_sizes(queries: int, keys: int) -> kernels.BlockSizes:
  """Returns the largest blocks that divide a device's queries and keys, up to what fits into VMEM."""
  q, kv = largest_block(queries, 512), largest_block(keys, 512)
  return kernels.BlockSizes(
    block_q=q,
    block_kv=kv,
    block_kv_compute=kv,
    block_q_dkv=q,
    block_kv_dkv=kv,
    block_kv_dkv_compute=kv,
    block_q_dq=q,
    block_kv_dq=kv,
  )


def largest_block(length: int, limit: int) -> int:
  """Returns the largest multiple of 128 that divides `length` (itself one) and is at most `limit`."""
  return max(size for size in range(LANES, min(length, limit) + 1, LANES) if length % size == 0)
