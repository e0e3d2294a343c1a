"""Flash attention for TPUs: JAX's Pallas "splash" kernel, called on the heads and queries of each device.

The kernel skips blocks that are fully masked, and computes the mask of the other blocks from positions. So no array of
size T * S exists. Grouped queries do not need repeated keys and values: the kernel maps a query head to its key head.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.extend.core import ClosedJaxpr, Literal, primitives
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer.config.errors import ConfigError
from trainer.kernels.attention_shard import per_device
from trainer.parallel import zigzag
from trainer.parallel.mesh import CONTEXT, TENSOR

LANES = 128
MAX_DQ = 4  # see `head_groups`


def order(mesh: Mesh | None, seq_len: int) -> Mesh | None:
  """Returns what `build` expects of the positions, as `attention.Attention.zigzag`.

  Zigzag order needs parts of whole blocks: a block with positions of two parts is computed for both of them.
  """
  context = 1 if mesh is None else mesh.shape[CONTEXT]
  return mesh if context > 1 and seq_len % (2 * context * LANES) == 0 else None


def build(
  *, mesh: Mesh | None, seq_len: int, num_q_heads: int, num_kv_heads: int, head_bytes: int, interpret: bool = False
) -> Callable[..., jax.Array]:
  """Returns a function with the contract of `attention.Attention`, for sequences of exactly `seq_len` in `order`.

  `head_bytes` is the size of one head at one position: H times the size of an element. `interpret` is for tests: it
  runs the kernel on any platform, slowly. Raises ConfigError if the positions of a device are not a multiple of 128.
  """
  context, tensor = (1, 1) if mesh is None else (mesh.shape[CONTEXT], mesh.shape[TENSOR])
  if seq_len % (LANES * context):
    raise ConfigError(
      f"max_target_length={seq_len} with context parallelism {context}: each TPU has {seq_len / context:g} positions, "
      f"and its flash kernel needs a multiple of {LANES}. Set max_target_length to a multiple of {LANES * context}, or "
      "attention=dot_product."
    )
  positions, mask = order(mesh, seq_len), masks.CausalMask((seq_len, seq_len), shard_count=context)
  part = seq_len // context
  if positions is not None:
    mask.q_sequence, part = zigzag.positions(context, seq_len), part // 2
  groups = head_groups(seq_len, num_kv_heads // tensor, head_bytes)
  with jax.ensure_compile_time_eval():
    kernel = kernels.make_splash_mha(
      masks.MultiHeadMask([mask] * (num_q_heads // tensor // max(groups, 1))),
      head_shards=1,
      q_seq_shards=context,
      block_sizes=block_sizes(part, seq_len, head_bytes, fused=groups > 0),
      residual_checkpoint_name="context",
      interpret=interpret,
    )
  # Keep the constants off any device: the kernel may be built for another backend, or before a backend starts.
  kernel = jax.tree.map(np.asarray, kernel)
  local = functools.partial(_local, max(groups, 1))
  if mesh is None or mesh.size == 1:
    return functools.partial(local, kernel)
  specs = kernel.manual_sharding_spec(NamedSharding(mesh, PartitionSpec(None, CONTEXT)))
  return per_device(local, mesh, kernel, specs, positions)


def _local(
  groups: int,
  kernel: Any,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  q_segment_ids: jax.Array,
  kv_segment_ids: jax.Array,
) -> jax.Array:
  """Returns attention of local shapes: q [B, T, N, H], k and v [B, S, K, H] with all S keys, ids [B, T] and [B, S].

  kernel: of N / groups heads. Barriers put the groups in order, in both passes, so that the partial dqs of one group
  exist at a time.
  """
  scaled = (q * q.shape[-1] ** -0.5).astype(q.dtype)
  each = zip(*(jnp.split(x.swapaxes(1, 2), groups, axis=1) for x in (scaled, k, v)), strict=True)
  attend = functools.partial(jax.vmap(_attend, in_axes=(None, 0, 0, 0, 0)), kernel)
  segment_ids = kernels.SegmentIds(q_segment_ids, kv_segment_ids)
  outs: list[jax.Array] = []
  for heads in each:
    if outs:
      heads, outs[-1] = jax.lax.optimization_barrier((heads, outs[-1]))
    outs.append(attend(*heads, segment_ids))
  return jnp.concatenate(outs, axis=1).swapaxes(1, 2)


@jax.custom_vjp
def _attend(kernel: Any, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: kernels.SegmentIds) -> jax.Array:
  """Returns kernel(q, k, v, segment_ids). The derivative adds the parts of dq one by one.

  The fused backward kernel writes a dq for each block of keys, and JAX sums them over the first dim. The TPU compiler
  estimates 13 times the cycles of additions for this sum: 5 % of a step of llama3.1-70b on 7x.
  """
  out: jax.Array = kernel(q, k, v, segment_ids)
  return out


def _attend_forward(
  kernel: Any, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: kernels.SegmentIds
) -> tuple[jax.Array, Any]:
  return jax.vjp(lambda *arrays: kernel(*arrays, segment_ids), q, k, v)


def _attend_backward(derivative: Any, g: jax.Array) -> tuple[Any, ...]:
  traced = jax.make_jaxpr(derivative)(g)
  return None, *_with_additions(traced, g), None


_attend.defvjp(_attend_forward, _attend_backward)


def _with_additions(traced: ClosedJaxpr, *arrays: jax.Array) -> list[Any]:
  """Returns what the traced function returns for `arrays`, with sums over the first dim as additions in its order."""
  values = dict(zip([*traced.jaxpr.constvars, *traced.jaxpr.invars], [*traced.consts, *arrays], strict=True))
  unconverted: dict[Any, jax.Array] = {}
  read = lambda variable: variable.val if isinstance(variable, Literal) else values[variable]
  for equation in traced.jaxpr.eqns:
    primitive, given = equation.primitive, [read(variable) for variable in equation.invars]
    with jax.named_scope(str(equation.params.get("name", primitive))):  # stepcost knows a kernel by its name
      if primitive is primitives.jit_p:
        results = _with_additions(equation.params["jaxpr"], *given)
      elif primitive is primitives.reduce_sum_p and equation.params["axes"] == (0,):
        # Each part is converted alone: otherwise the compiler would write all of them in float32.
        parts = unconverted.get(equation.invars[0], given[0])
        results = [functools.reduce(operator.add, (part.astype(given[0].dtype) for part in parts))]
      else:
        results = primitive.bind(*given, **equation.params)
        results = results if primitive.multiple_results else [results]
    if primitive is primitives.convert_element_type_p:
      unconverted[equation.outvars[0]] = given[0]
    values.update(zip(equation.outvars, results, strict=True))
  return [read(variable) for variable in traced.jaxpr.outvars]


def head_groups(keys: int, kv_heads: int, head_bytes: int) -> int:
  """Returns the number of groups of heads that the fused backward kernel computes one after the other; 0: two kernels.

  The fused kernel writes one partial dq for each block of keys (see `_attend`), and computes five matmuls where two
  kernels compute seven. The groups are as many as keep the partial dqs of one group within MAX_DQ times the dq of all
  heads. If the heads of keys are too few for that, twice as many are allowed.
  """
  blocks = keys // _backward_block(keys, head_bytes)
  groups = next((n for n in range(1, kv_heads + 1) if kv_heads % n == 0 and blocks <= MAX_DQ * n), kv_heads)
  return groups if blocks <= 2 * MAX_DQ * groups else 0


def _backward_block(keys: int, head_bytes: int) -> int:
  """Returns the number of keys of a block of the fused backward kernel."""
  return largest_block(keys, 2048 if head_bytes <= 256 and keys > 2048 else _limit(head_bytes))


def _limit(head_bytes: int) -> int:
  """Returns the largest block that fits into the VMEM of a v4 with all kernels."""
  return 1024 if head_bytes <= 512 else 512


def block_sizes(queries: int, keys: int, head_bytes: int, *, fused: bool) -> kernels.BlockSizes:
  """Returns the block sizes for the `queries` of a device and all `keys`, both multiples of 128.

  The sizes minimise the cycles that the TPU compiler schedules. For a v5e (H = 128, T = 2048, per head): forward
  17.9 k with blocks of 1024 x 1024 computed by 512 keys, 20.0 k with 512 x 512, 21.8 k with 256 x 512.

  fused: one backward kernel with partial dqs. For T = 2048 two blocks of 1024 keys take 30.6 k; one block of 2048
  computes a third more scores and takes 40.8 k; two kernels without partial sums (dq; dk and dv) take 43.2 k. For
  T = 4096 two blocks of 2048 keys take 7 k less than four of 1024.

  The limits are for v4, which has the least VMEM: 2048 keys do not fit if a head has more than 256 bytes (H = 256, or
  float32), and 1024 keys do not fit if it has more than 512.
  """
  limit = _limit(head_bytes)
  q, kv = largest_block(queries, limit), largest_block(keys, limit)
  backward = _backward_block(keys, head_bytes) if fused else kv
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
  """Returns the largest multiple of 128 that divides `length` (a multiple of 128) and is at most `limit`."""
  return max(size for size in range(LANES, min(length, limit) + 1, LANES) if length % size == 0)
