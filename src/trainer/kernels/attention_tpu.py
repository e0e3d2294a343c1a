"""Flash attention for TPUs: Pallas kernels that compute only the blocks of scores that some query sees.

A block has the scores of up to 1024 queries and 1024 keys. No array of size T * S exists. Blocks above the diagonal are
no steps of the grid, and a block in which no query has a segment in common with a key is skipped. A block that is
neither on the diagonal nor at the edge of a segment has no mask, and of one on the diagonal only the tiles are computed
that some query sees. Grouped queries read the keys of their head.

The backward pass is one kernel of five matmuls. It keeps the gradients of all queries of a key head in VMEM while it
goes from block to block of the keys, so that they are written once. Queries that do not fit there are split into
chunks; the parts of the gradients of keys and values that each chunk adds are then summed.

T: queries of a device, S: keys of the whole sequence, G: query heads of a key head. Exponentials have base 2.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

from trainer.config.errors import ConfigError
from trainer.kernels import attention_tpu_kernels as kernels
from trainer.kernels import attention_tpu_steps as steps_of
from trainer.kernels.attention_shard import per_device
from trainer.kernels.attention_tpu_kernels import Sizes
from trainer.kernels.attention_tpu_steps import BLOCK, LANES, Steps, largest_block
from trainer.parallel import zigzag
from trainer.parallel.mesh import CONTEXT

# VMEM of a v4, and of this kernel on newer chips, which have at least 64 MiB; bytes.
SMALL_VMEM, VMEM = 16 << 20, 32 << 20


def order(mesh: Mesh | None, seq_len: int) -> Mesh | None:
  """Returns what `build` expects of the positions, as `attention.AttentionKernel.zigzag`.

  Zigzag order needs parts of whole blocks: a block with positions of two parts is computed for both of them.
  """
  context = 1 if mesh is None else mesh.shape[CONTEXT]
  return mesh if context > 1 and seq_len % (2 * context * LANES) == 0 else None


def build(
  *, mesh: Mesh | None, seq_len: int, heads_per_key: int, head_dim: int, itemsize: int, interpret: Any = False
) -> Callable[..., jax.Array]:
  """Returns a function with the contract of `attention.AttentionKernel`, for sequences of exactly `seq_len` in `order`.

  heads_per_key: G. itemsize: bytes of an element of the arrays. `interpret` is for tests: True or
  `pltpu.InterpretParams()` run the kernels on any platform, slowly. Raises ConfigError if the positions of a device are
  not a multiple of 128, or if the sequence has so many small blocks that the list of them does not fit.
  """
  context = 1 if mesh is None else mesh.shape[CONTEXT]
  if seq_len % (LANES * context):
    raise ConfigError(
      f"max_target_length={seq_len} with context parallelism {context}: each TPU has {seq_len / context:g} positions, "
      f"and its flash kernel needs a multiple of {LANES}. Set max_target_length to a multiple of {LANES * context}, or "
      "attention=dot_product."
    )
  zigzag_mesh = order(mesh, seq_len)
  length = seq_len // context
  small = mesh is not None and mesh.devices.flat[0].device_kind.startswith("TPU v4")
  vmem = SMALL_VMEM if small else VMEM
  limit = BLOCK if head_dim * itemsize <= (256 if small else 512) else BLOCK // 2
  # The number of queries whose gradients fit into a share of VMEM, in float32.
  fitting = vmem // (4 if small else 2) // (heads_per_key * 4 * LANES * math.ceil(head_dim / LANES))
  queries = largest_block(length if zigzag_mesh is None else length // 2, min(limit, max(LANES, fitting)))
  keys = largest_block(seq_len, limit)
  chunk = max(
    size for size in range(queries, length + 1, queries) if length % size == 0 and size <= max(queries, fitting)
  )
  places = np.arange(seq_len) if zigzag_mesh is None else zigzag.positions(context, seq_len)
  starts = places.reshape(context, -1)[:, ::queries].astype(np.int32)
  blocks = max(int(of_device.sum()) for of_device in -(-(starts + queries) // keys))
  if blocks > steps_of.MAX_BLOCKS:
    raise ConfigError(
      f"max_target_length={seq_len} with context parallelism {context}: each TPU computes {blocks} blocks of {queries} "
      f"queries and {keys} keys, and its flash kernel can list {steps_of.MAX_BLOCKS}. Set max_target_length to a "
      f"multiple of {2 * context * BLOCK}, ici_context_parallelism to more, or attention=dot_product."
    )
  steps = steps_of.make(starts, queries, keys, seq_len // keys, chunk // queries)
  scores = max(steps_of.computed(each, queries, keys) for each in starts.tolist())
  sizes = Sizes(queries, keys, chunk, scores, vmem, interpret)
  local = functools.partial(_local, sizes)
  if mesh is None or mesh.size == 1:
    return functools.partial(local, steps)
  return per_device(local, mesh, steps, jax.tree.map(lambda _: PartitionSpec(CONTEXT), steps), zigzag_mesh)


def _local(
  sizes: Sizes,
  steps: Steps,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  q_segment_ids: jax.Array,
  kv_segment_ids: jax.Array,
) -> jax.Array:
  """Returns attention of local shapes: q [B, T, N, H], k and v [B, S, K, H] with all S keys, ids [B, T] and [B, S]."""
  of_device = jax.tree.map(lambda each: each[0], steps)
  scaled = (q.astype(jnp.float32) * (q.shape[-1] ** -0.5 * math.log2(math.e))).astype(q.dtype)
  heads = (x.swapaxes(1, 2) for x in (scaled, k, v))
  return _attend(sizes, of_device, *heads, q_segment_ids, kv_segment_ids).swapaxes(1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(sizes: Sizes, steps: Steps, *arrays: jax.Array) -> jax.Array:
  """Returns out [B, N, T, H] of q [B, N, T, H], k and v [B, K, S, H], and ids [B, T] and [B, S].

  q is scaled: q k' are the exponents of 2.
  """
  return _attend_forward(sizes, steps, *arrays)[0]


def _attend_forward(sizes: Sizes, steps: Steps, *arrays: jax.Array) -> tuple[jax.Array, Any]:
  out, norms = (checkpoint_name(x, "context") for x in kernels.forward(sizes, steps, arrays))
  return out, (steps, arrays, out, norms)


def _attend_backward(sizes: Sizes, residuals: Any, dout: jax.Array) -> tuple[Any, ...]:
  steps, arrays, out, norms = residuals
  return None, *kernels.backward(sizes, steps, arrays, out, norms, dout), None, None


_attend.defvjp(_attend_forward, _attend_backward)
