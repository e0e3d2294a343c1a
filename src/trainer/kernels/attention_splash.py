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


def build(
  *, mesh: Mesh | None, seq_len: int, num_q_heads: int, head_bytes: int, interpret: bool = False
) -> Callable[..., jax.Array]:
  """Returns attention for sequences of exactly `seq_len` (the contract of `attention.Attention`).

  `head_bytes`: the size of one head of one position, H times that of an element. Raises ValueError where a device's
  part of the sequence is not a multiple of 128.
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
      block_sizes=block_sizes(seq_len // context, seq_len, head_bytes),
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


def block_sizes(queries: int, keys: int, head_bytes: int) -> kernels.BlockSizes:
  """Returns the blocks for a device's `queries` and all `keys`, both multiples of 128.

  By the instructions that the TPU compiler schedules for a v5e (H = 128, T = 2048, per head): forward 17.9 k in blocks
  of 1024 x 1024 computed by 512 keys, 20.0 k in 512 x 512, 21.8 k in 256 x 512; backward 30.6 k fused, 43.2 k as two
  kernels for dq and dk, dv. 2048 x 2048 does not fit into VMEM. The fused kernel writes one partial dq for every block
  of keys, so it takes larger blocks when the sequence is long and yields to the two kernels where there would be more
  than four. A v4 has the least VMEM: 2048 keys do not fit there when a head takes more than 256 bytes (H = 256, or
  float32), nor 1024 when it takes more than 512.
  """
  limit = 1024 if head_bytes <= 512 else 512
  q, kv = largest_block(queries, limit), largest_block(keys, limit)
  backward = kv if keys // kv <= 4 else largest_block(keys, 2048 if head_bytes <= 256 else limit)
  fused = keys // backward <= 4
  backward = backward if fused else kv
  return kernels.BlockSizes(
    block_q=q,
    block_kv=kv,
    block_kv_compute=largest_block(kv, 512),
    block_q_dkv=q,
    block_kv_dkv=backward,
    block_kv_dkv_compute=largest_block(backward, 512),
    block_q_dq=None if fused else q,
    block_kv_dq=None if fused else kv,
    use_fused_bwd_kernel=fused,
  )


def largest_block(length: int, limit: int) -> int:
  """Returns the largest multiple of 128 that divides `length` (itself one) and is at most `limit`."""
  return max(size for size in range(LANES, min(length, limit) + 1, LANES) if length % size == 0)
