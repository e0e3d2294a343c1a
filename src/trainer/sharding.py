"""The tables from logical axes to mesh axes, for parameters and for activations."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from trainer.config.errors import ConfigError
from trainer.mesh import CONTEXT, FSDP, TENSOR

# Logical axis -> mesh axes, tried in order. A mesh axis shards at most one dim of an array. The mesh axis `data` does
# not appear: every slice holds the whole state, and the step is written for one slice, inside a shard_map that is
# manual over `data`.
PARAMETER_RULES: dict[str, tuple[str, ...]] = {
  "layers": (),
  "vocab": (FSDP, TENSOR),
  "table_embed": (FSDP,),  # uses fsdp only if the vocabulary does not divide by it (151936 on 256 chips)
  "head_embed": (FSDP,),  # as table_embed; a separate name, because weight decay applies to a head and not to the table
  "embed": (FSDP,),
  "heads": (TENSOR,),
  "kv_heads": (TENSOR,),
  "mlp": (TENSOR,),
  "head_dim": (),
  "norm": (),
}
# Dims that stay unsharded if their size does not divide: another dim of the same array then uses the mesh axis.
OPTIONAL = frozenset({"vocab"})

ACTIVATION_RULES: dict[str, tuple[str, ...]] = {
  "batch": (FSDP,),
  "length": (CONTEXT,),
  "embed": (),
  "heads": (TENSOR,),
  "kv_heads": (TENSOR,),
  "mlp": (TENSOR,),
  "head_dim": (),
  # For the embedding lookup, each chip has all tokens of the slice and a part of the width (see Decoder).
  "table_vocab": (FSDP,),
  "lookup_batch": (),
  "lookup_length": (CONTEXT,),
  "lookup_vocab": (),
  "lookup_embed": (FSDP,),
  # The loss gathers a chunk of tokens over fsdp and context and splits the vocabulary instead (vocabulary-parallel
  # loss, Megatron-LM). Each chip owns the gradient of its rows of the head, so no array as large as the head is sent.
  "head_vocab": (FSDP, TENSOR),
  "loss_batch": (),
  "loss_length": (),
  "vocab": (FSDP, TENSOR, CONTEXT),
}


def parameter_spec(axes: tuple[str, ...], shape: tuple[int, ...], mesh: Mesh, name: str) -> PartitionSpec:
  """Returns the PartitionSpec of a parameter `name` with logical `axes` (one per dim of `shape`).

  Raises ConfigError if a size does not divide by the mesh axes of its rule.
  """
  used: set[str] = set()
  entries: list[Any] = []
  for axis, size in zip(axes, shape, strict=True):
    taken: list[str] = []
    for mesh_axis in PARAMETER_RULES[axis]:
      parts = math.prod(mesh.shape[a] for a in taken) * mesh.shape[mesh_axis]
      if mesh_axis in used or mesh.shape[mesh_axis] == 1:
        continue
      if size % parts:
        if axis in OPTIONAL:
          continue
        raise ConfigError(
          f"Weight {name} {shape}: its dim '{axis}' of size {size} is sharded over mesh axis '{mesh_axis}' "
          f"({parts} ways) and does not divide. Choose ici/dcn_{mesh_axis}_parallelism that divides {size}."
        )
      taken.append(mesh_axis)
    used.update(taken)
    entries.append(tuple(taken) if len(taken) > 1 else (taken[0] if taken else None))
  return PartitionSpec(*entries)


def constrain(x: jax.Array, *axes: str) -> jax.Array:
  """Returns `x` with the sharding of its logical activation `axes`; unchanged outside a mesh (single-device tests)."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return x
  entries = []
  for axis in axes:
    names = [name for name in ACTIVATION_RULES[axis] if mesh.shape[name] > 1]
    entries.append(tuple(names) if len(names) > 1 else (names[0] if names else None))
  return jax.lax.with_sharding_constraint(x, PartitionSpec(*entries))


def num_shards(*axes: str) -> int:
  """Returns the number of parts into which the mesh of the current trace splits `axes`; 1 outside a mesh."""
  mesh = jax.sharding.get_abstract_mesh()
  return 1 if mesh.empty else math.prod(mesh.shape[axis] for axis in axes)


def check_replication(shapes: Any, shardings: Any, tolerance: float) -> None:
  """Raises ConfigError if every device of a slice holds more than the share `tolerance` of all parameters.

  `shapes` and `shardings` are matching pytrees (ShapeDtypeStruct, NamedSharding). The check applies only to a mesh that
  shards parameters. The most common cause is a dim that no rule covers.
  """
  pairs = list(zip(jax.tree_util.tree_leaves_with_path(shapes), jax.tree.leaves(shardings), strict=True))
  num_devices = math.prod(pairs[0][1].mesh.shape[axis] for axis in (FSDP, TENSOR)) if pairs else 1
  if num_devices == 1:
    return
  total = sum(leaf.size for (_, leaf), _ in pairs)
  replicated = [(jax.tree_util.keystr(path), leaf.size) for (path, leaf), sh in pairs if sh.is_fully_replicated]
  share = sum(size for _, size in replicated) / total
  if share > tolerance:
    worst = ", ".join(f"{name} ({size:,})" for name, size in sorted(replicated, key=lambda item: -item[1])[:3])
    raise ConfigError(
      f"{share:.1%} of the parameters would be replicated on each of {num_devices} devices, more than "
      f"sharding_tolerance={tolerance:.1%}: {worst}. Choose parallelisms that divide them, or raise sharding_tolerance."
    )
