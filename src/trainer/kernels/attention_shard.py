"""Runs an attention kernel on the part of the arrays that each device holds.

XLA cannot partition a Pallas kernel or a loop over blocks. So the kernel runs inside a `jax.shard_map` that is manual
over every mesh axis that the caller has not made manual yet: B is split over data and fsdp, heads over tensor, T over
context. Keys and values are gathered over context; their gradients are scattered back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from trainer.parallel import zigzag
from trainer.parallel.mesh import CONTEXT, DATA, FSDP, TENSOR

# (operand, q, k, v, q_segment_ids, kv_segment_ids) -> out. All shapes are local except S, which is global.
Local = Callable[[Any, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def per_device(
  local: Local, mesh: Mesh, operand: Any = None, operand_specs: Any = None, order: Mesh | None = None
) -> Callable[..., jax.Array]:
  """Returns attention on whole arrays. It calls `local` with the part of each device.

  `local` also receives `operand`, split by `operand_specs`. order: as `attention.AttentionKernel.zigzag`; `local` gets
  keys and values in natural order. The result works under `jax.jit`, inside a `jax.shard_map` that is manual over some
  axes of `mesh`, and outside of both.
  """

  def on_device(
    operand: Any, q: jax.Array, k: jax.Array, v: jax.Array, q_segment_ids: jax.Array, kv_segment_ids: jax.Array
  ) -> jax.Array:
    if mesh.shape[CONTEXT] > 1:
      gather = lambda x: zigzag.gathered(order, jax.lax.all_gather(x, CONTEXT, axis=1, tiled=True))
      k, v, kv_segment_ids = map(gather, (k, v, kv_segment_ids))
    return local(operand, q, k, v, q_segment_ids, kv_segment_ids)

  def call(*arrays: jax.Array) -> jax.Array:
    context = jax.sharding.get_abstract_mesh()
    manual = set() if context.empty else set(context.manual_axes)
    batch = tuple(axis for axis in (DATA, FSDP) if axis in mesh.axis_names and axis not in manual)
    heads = PartitionSpec(batch, CONTEXT, TENSOR)
    ids = PartitionSpec(batch, CONTEXT)
    mapped = jax.shard_map(
      on_device,
      mesh=mesh if context.empty else None,
      axis_names=set(mesh.axis_names) - manual,
      in_specs=(operand_specs, heads, heads, heads, ids, ids),
      out_specs=heads,
      check_vma=False,
    )
    return mapped(operand, *arrays)

  return call
