"""One table from logical axes to mesh axes, for parameters and for activations."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from trainer.mesh import CONTEXT, FSDP, TENSOR

# Logical axis -> mesh axes, tried in order; a mesh axis serves one dim of an array at most. Nothing here names the
# mesh axis `data`: parameters are replicated across slices (every slice holds the whole state), and the step is
# written per slice, inside a shard_map that is manual over `data`.
PARAMETER_RULES: dict[str, tuple[str, ...]] = {
  "layers": (),
  "vocab": (FSDP, TENSOR),
  "table_embed": (FSDP,),  # takes fsdp only where the vocabulary does not divide by it (151936 on 256 chips)
  "head_embed": (FSDP,),  # the same; another name because weight decay tells a head from the table
  "embed": (FSDP,),
  "heads": (TENSOR,),
  "kv_heads": (TENSOR,),
  "mlp": (TENSOR,),
  "head_dim": (),
  "norm": (),
}
# Dims that may stay unsharded where the size does not divide, because another dim of the same array takes the axis.
OPTIONAL = frozenset({"vocab"})

ACTIVATION_RULES: dict[str, tuple[str, ...]] = {
  "batch": (FSDP,),
  "length": (CONTEXT,),
  "embed": (),
  "heads": (TENSOR,),
  "kv_heads": (TENSOR,),
  "mlp": (TENSOR,),
  "head_dim": (),
  # The embedding lookup has all tokens of the slice on each chip and splits the width (see Decoder).
  "table_vocab": (FSDP,),
  "lookup_batch": (),
  "lookup_length": (CONTEXT,),
  "lookup_vocab": (),
  "lookup_embed": (FSDP,),
  # The loss gathers a chunk of tokens over fsdp and context and splits the vocabulary instead: a chip then owns the
  # gradient of its rows of the head, so nothing of the size of the head is sent while it is computed
  # (vocabulary-parallel loss, Megatron-LM).
  "head_vocab": (FSDP, TENSOR),
  "loss_batch": (),
  "loss_length": (),
  "vocab": (FSDP, TENSOR, CONTEXT),
}


def parameter_spec(axes: tuple[str, ...], shape: tuple[int, ...], mesh: Mesh, name: str) -> PartitionSpec:
  """The PartitionSpec of a parameter `name` with logical `axes` (one per dim of `shape`).

  Raises ValueError where a size does not divide by the mesh axes that its rule asks for.
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
        raise ValueError(
          f"Weight {name} {shape}: its dim '{axis}' of size {size} is sharded over mesh axis '{mesh_axis}' "
          f"({parts} ways) and does not divide. Choose ici/dcn_{mesh_axis}_parallelism that divides {size}."
        )
      taken.append(mesh_axis)
    used.update(taken)
    entries.append(tuple(taken) if len(taken) > 1 else (taken[0] if taken else None))
  return PartitionSpec(*entries)


def constrain(x: jax.Array, *axes: str) -> jax.Array:
  """`x` with the sharding of its logical activation `axes`; itself outside of a mesh (single-device tests)."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return x
  entries = []
  for axis in axes:
    names = [name for name in ACTIVATION_RULES[axis] if mesh.shape[name] > 1]
    entries.append(tuple(names) if len(names) > 1 else (names[0] if names else None))
  return jax.lax.with_sharding_constraint(x, PartitionSpec(*entries))


def num_shards(*axes: str) -> int:
  """Parts into which the mesh of the surrounding trace splits what lies on the mesh `axes`; 1 outside of a mesh."""
  mesh = jax.sharding.get_abstract_mesh()
  return 1 if mesh.empty else math.prod(mesh.shape[axis] for axis in axes)


def check_replication(shapes: Any, shardings: Any, tolerance: float) -> None:
  """Raises ValueError when more than the share `tolerance` of the parameters' elements is on every device of a slice.

  `shapes` and `shardings` are matching pytrees (ShapeDtypeStruct, NamedSharding). Only a mesh with a sharded axis
  can be wrong; the most common cause is a dim that no rule covers.
  """
  pairs = list(zip(jax.tree_util.tree_leaves_with_path(shapes), jax.tree.leaves(shardings), strict=True))
  num_devices = math.prod(pairs[0][1].mesh.shape[axis] for axis in (FSDP, TENSOR)) if pairs else 1
  if num_devices == 1:
    return
  total = sum(leaf.size for (_, leaf), _ in pairs)
  whole = [(jax.tree_util.keystr(path), leaf.size) for (path, leaf), sh in pairs if sh.is_fully_replicated]
  share = sum(size for _, size in whole) / total
  if share > tolerance:
    worst = ", ".join(f"{name} ({size:,})" for name, size in sorted(whole, key=lambda item: -item[1])[:3])
    raise ValueError(
      f"{share:.1%} of the parameters would be replicated on each of {num_devices} devices, more than "
      f"sharding_tolerance={tolerance:.1%}: {worst}. Choose parallelisms that divide them, or raise sharding_tolerance."
    )
