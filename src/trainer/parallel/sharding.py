"""The tables from logical axes to mesh axes, for parameters and for activations."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from stepcost import chips
from trainer.config.errors import ConfigError
from trainer.parallel.mesh import CONTEXT, DATA, FSDP, TENSOR

# Logical axis -> mesh axes, tried in order. A mesh axis shards at most one dim of an array. The mesh axis `data` does
# not appear: every slice holds the whole state, and the step is written for one slice, inside a shard_map that is
# manual over `data`.
PARAMETER_RULES: dict[str, tuple[str, ...]] = {
  "layers": (),
  "joined": (),  # weights that one matmul reads
  "vocab": (FSDP, TENSOR, CONTEXT),
  # The width of a table or head uses fsdp only if its vocabulary does not divide by it (151936 on 256 chips). Two
  # names, because weight decay applies to a head and not to a table.
  "table_embed": (FSDP, CONTEXT),
  "head_embed": (FSDP, CONTEXT),
  "embed": (FSDP, CONTEXT),
  "heads": (TENSOR,),
  "kv_heads": (TENSOR,),
  "mlp": (TENSOR,),
  "head_dim": (),
  "experts": (FSDP,),  # rather than their width: the first dim of an array is gathered without copies
  "load": (),
  "norm": (),
}
# Dims that stay unsharded if their size does not divide: another dim of the same array then uses the mesh axis. With
# context, every dim does: it splits activations first of all.
OPTIONAL = frozenset({"vocab", "experts"})

MOST_REPLICATED = 0.02  # share of the parameters that each device of a slice may hold
_TILE_ROWS = 16  # of a TPU's memory tile, in bfloat16
# Rows of the head on a device. A chunk of the loss has 96 MiB of logits: 1,024 tokens with this many rows. With fewer
# tokens, adding to the gradient of the rows in memory takes longer than the matmul (v5e).
_MAX_HEAD_ROWS = 24 << 10

ACTIVATION_RULES: dict[str, tuple[str, ...]] = {
  "batch": (FSDP,),
  "length": (CONTEXT,),
  "embed": (),
  "heads": (TENSOR,),
  "kv_heads": (TENSOR,),
  "mlp": (TENSOR,),
  "head_dim": (),
  "experts": (),
  # For the embedding lookup, each chip has all tokens of the slice and a part of the width (see Decoder).
  "table_vocab": (FSDP,),
  "lookup_batch": (),
  "lookup_length": (CONTEXT,),
  "lookup_vocab": (),
  "lookup_embed": (FSDP,),
  # The loss gathers a chunk of tokens over fsdp and splits the vocabulary instead: see LossExchange.
  "loss_batch": (),
  "vocab": (FSDP, TENSOR),
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
        if axis in OPTIONAL or mesh_axis == CONTEXT:
          continue
        raise ConfigError(
          f"Weight {name} {shape}: its dim '{axis}' of size {size} is sharded over mesh axis '{mesh_axis}' "
          f"({parts} ways) and does not divide. Choose ici_{mesh_axis}_parallelism that divides {size}."
        )
      taken.append(mesh_axis)
    used.update(taken)
    entries.append(tuple(taken) if len(taken) > 1 else (taken[0] if taken else None))
  return PartitionSpec(*entries)


def constrain(x: jax.Array, *axes: str) -> jax.Array:
  """Returns `x` with the sharding of its logical activation `axes`; unchanged outside a mesh (single-device tests).

  A mesh axis that is manual in the current trace is left out: `x` is already the part of one device there.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return x
  return jax.lax.with_sharding_constraint(x, _activation_spec(axes, mesh))


def _activation_spec(axes: tuple[str, ...], mesh: AbstractMesh) -> PartitionSpec:
  """Returns the PartitionSpec of an activation with logical `axes` over the axes of `mesh` that are not manual."""
  entries = []
  for axis in axes:
    names = [name for name in ACTIVATION_RULES[axis] if mesh.shape[name] > 1 and name not in mesh.manual_axes]
    entries.append(tuple(names) if len(names) > 1 else (names[0] if names else None))
  return PartitionSpec(*entries)


def of_all_slices(x: jax.Array, *axes: str) -> jax.Array:
  """Returns the activations `x` of all slices, concatenated along dim 0, in a trace that is manual over `data`.

  Every device sends only its part of `x`, which is sharded by its logical `axes`. The compiler's own partitioning
  would first gather `x` inside the slice.
  """
  mesh = jax.sharding.get_abstract_mesh()
  spec = _activation_spec(axes, mesh)
  automatic = tuple(axis for axis in mesh.axis_names if axis not in mesh.manual_axes)
  return on_shards(automatic, lambda part: jax.lax.all_gather(part, DATA, axis=0, tiled=True), spec, spec, x)


def manual_over_fsdp(run: Callable[..., Any], weights: Any, totals: Any, axes: dict[str, Any], rows: Any) -> Any:
  """Returns run(weights, totals, rows) = (x [B, T, D], totals["head"]), computed by each shard of fsdp on its rows.

  axes: the logical axes of the `weights` under "layers", and of the output head under "head". totals: {"layers": ...,
  "head": ...}: arrays with these axes, or None for both. `run` returns totals["head"] unchanged. rows: arrays [B, ...].

  Inside `run`, arrays are local to one shard, and `with_whole_weight` gathers weights. Then the gradient of a weight is
  summed and split over fsdp by one reduce-scatter. The TPU compiler's own partitioning would send twice as much: it
  sums whole gradients and then cuts its shard out of them.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.shape[FSDP] == 1:
    return run(weights, totals, rows)
  specs = _specs_over_fsdp(weights, axes["layers"], mesh)
  total_specs = {key: None if x is None else _specs_over_fsdp(x, axes[key], mesh) for key, x in totals.items()}
  batch = PartitionSpec(FSDP)

  def run_shard(weights: Any, totals: Any, rows: Any) -> Any:
    once = lambda total, spec: total if FSDP in spec else _on_first_shard(total)
    return run(weights, jax.tree.map(once, totals, total_specs), rows)

  return jax.shard_map(
    run_shard,
    axis_names={FSDP},
    in_specs=(specs, total_specs, jax.tree.map(lambda _: batch, rows)),
    out_specs=(batch, total_specs["head"]),
    check_vma=False,
  )(weights, totals, rows)


def in_parts_over_fsdp(
  run: Callable[..., Any], weights: Any, axes: Any, rows: Any, carried: Any = None, *, returns_grads: bool = False
) -> Any:
  """Returns run(weights, rows, carried) = (x [B, T, D], results), computed by each shard of fsdp on its rows.

  For a derivative that is computed in parts, each by a call. weights, axes, rows: as in `manual_over_fsdp`. carried:
  any arrays of a shard that an earlier call has returned as results. Outside `run` they have a first dim of shards.
  returns_grads: the results are gradients of the weights, or of some of their rows, and are summed over fsdp.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.shape[FSDP] == 1:
    return run(weights, rows, carried)
  specs = _specs_over_fsdp(weights, axes, mesh)
  batch = PartitionSpec(FSDP)

  def run_shard(weights: Any, rows: Any, carried: Any) -> Any:
    x, results = run(weights, rows, jax.tree.map(lambda array: array[0], carried))
    if not returns_grads:
      return x, jax.tree.map(lambda array: array[None], results)
    whole = lambda grad, spec: grad if FSDP in spec else jax.lax.psum(grad, FSDP)
    return x, jax.tree.map(whole, results, specs)

  return jax.shard_map(
    run_shard,
    axis_names={FSDP},
    in_specs=(specs, batch, batch),
    out_specs=(batch, specs if returns_grads else batch),
    check_vma=False,
  )(weights, rows, carried)


def _on_first_shard(total: jax.Array) -> jax.Array:
  """Returns `total` on the first shard of fsdp and 0 on the others, with the gradient of `total` itself.

  The gradients of a weight that every shard has are summed over fsdp, so only one shard may add the total.
  """
  others = jnp.where(jax.lax.axis_index(FSDP) == 0, 0.0, -total)
  return total + jax.lax.stop_gradient(others)


def _specs_over_fsdp(weights: Any, axes: Any, mesh: AbstractMesh) -> Any:
  """Returns the specs of `weights` with logical `axes`, as far as they concern fsdp."""
  return jax.tree.map(
    lambda leaf, axes: _only_fsdp(parameter_spec(axes, leaf.shape, mesh, "of the layers")), weights, axes
  )


def _only_fsdp(spec: PartitionSpec) -> PartitionSpec:
  """Returns the part of the spec of a parameter that concerns fsdp."""
  has_fsdp = lambda entry: entry == FSDP or (isinstance(entry, tuple) and FSDP in entry)
  return PartitionSpec(*(FSDP if has_fsdp(entry) else None for entry in spec))


@dataclasses.dataclass(frozen=True)
class LossExchange:
  """The communication of a loss whose vocabulary is split over `shards` of fsdp (Megatron-LM), and T over `context`.

  With neighbours=1, each shard has its own rows of the head and gathers a chunk of the tokens of the slice. Otherwise
  each group of `neighbours` gathers its rows, and tokens are gathered only over shards that are in different groups and
  have the same place in them: shards / neighbours of them have the whole vocabulary together. Shards of
  context do not gather each other's tokens.
  """

  shards: int = 1
  neighbours: int = 1
  context: int = 1

  def gather_head(self, rows: jax.Array) -> jax.Array:
    """Returns the rows [V, ...] of all neighbours."""
    return self._run(jax.lax.all_gather, rows, self._groups, axis=0, tiled=True)

  def scatter_head(self, rows: jax.Array) -> jax.Array:
    """Returns the shard's own rows [V, ...], summed over all that have tokens: the derivative of `gather_head`."""
    return self._over_context(self._run(jax.lax.psum_scatter, rows, self._groups, scatter_dimension=0, tiled=True))

  def gather_tokens(self, x: jax.Array) -> jax.Array:
    """Returns x [B, ...] of all shards with which this shard splits the vocabulary."""
    return self._run(jax.lax.all_gather, x, self._groups.T, axis=0, tiled=True)

  def scatter_tokens(self, x: jax.Array) -> jax.Array:
    """Returns the shard's own part of x [B, ...], summed over the vocabulary: the derivative of `gather_tokens`.

    One reduce-scatter: the TPU compiler's own partitioning would send twice as much (see `manual_over_fsdp`).
    """
    return self._run(jax.lax.psum_scatter, x, self._groups.T, scatter_dimension=0, tiled=True)

  def max_over_vocab(self, x: Any) -> Any:
    return self._run(jax.lax.pmax, x, self._groups.T)

  def sum_over_vocab(self, x: Any) -> Any:
    return self._run(jax.lax.psum, x, self._groups.T)

  def sum_over_tokens(self, x: Any) -> Any:
    """Returns the sum over all tokens of the slice, from sums over the gathered tokens."""
    return self._over_context(self._run(jax.lax.psum, x, self._groups))

  def _over_context(self, x: Any) -> Any:
    return x if self.context == 1 else jax.lax.psum(x, CONTEXT)

  @property
  def _groups(self) -> np.ndarray:
    """The shards as an array [groups, neighbours]. A column has all shards that split the vocabulary."""
    return np.arange(self.shards).reshape(-1, self.neighbours)

  @staticmethod
  def _run(collective: Callable[..., Any], x: Any, groups: np.ndarray, **options: Any) -> Any:
    return x if groups.shape[1] == 1 else collective(x, FSDP, axis_index_groups=groups.tolist(), **options)


def loss_on_shards(run: Callable[..., Any], neighbours: int, head: Any, tokens: Any) -> Any:
  """Returns run(exchange, head, tokens) = (sums, (dx, dw)), computed by each shard of fsdp and context on its parts.

  fsdp shards dim 0 of all arrays, and context dim 1 of `tokens` and dx. neighbours: see `LossExchange`.
  """
  if num_shards(FSDP, CONTEXT) == 1:
    return run(LossExchange(), head, tokens)
  rows, places = PartitionSpec(FSDP), PartitionSpec(FSDP, CONTEXT)
  return jax.shard_map(
    functools.partial(run, LossExchange(num_shards(FSDP), neighbours, num_shards(CONTEXT))),
    axis_names={FSDP, CONTEXT},
    in_specs=(rows, places),
    out_specs=(PartitionSpec(), (places, rows)),
    check_vma=False,
  )(head, tokens)


def head_neighbours(mesh: Mesh, tokens: int, vocab: int) -> int:
  """Returns how many neighbours along fsdp gather their rows of the head for the loss; 1: none (see `LossExchange`).

  tokens: of a shard of fsdp and context in a micro-batch. The result is the length of the lines of devices that fsdp
  consists of, if gathering over lines saves more than half of what a device sends.
  """
  shards = mesh.shape[FSDP]
  coords = _fsdp_coords(mesh)
  neighbours = _length_of_line(coords)
  lines = [coords[i : i + neighbours] for i in range(0, len(coords), neighbours)]
  # tensor splits the rows of a shard too.
  if mesh.shape[TENSOR] > 1 or max(map(_dims, lines), default=0) > 1:
    return 1
  # Tokens travel in the compute dtype and their gradients in float32, and so do rows of the head and their gradients.
  sent = (shards // neighbours - 1) * tokens + (neighbours - 1) * vocab / shards
  # Half, because a ring along a line uses no more than half of the links of a device.
  saves = sent < (shards - 1) * tokens / 2
  return neighbours if saves and vocab * neighbours <= _MAX_HEAD_ROWS * shards else 1


def is_manual_over_fsdp() -> bool:
  """Returns whether arrays of the current trace are local to one shard of fsdp."""
  mesh = jax.sharding.get_abstract_mesh()
  return not mesh.empty and FSDP in mesh.manual_axes


def with_whole_weight(
  run: Callable[[Any, jax.Array], jax.Array],
  x: Any,
  w: jax.Array,
  axes: tuple[str, ...],
  first_stage: int = 1,
) -> jax.Array:
  """Returns run(x, whole weight) [B, T, ...] for arrays x [B, T, ...], in a trace that is manual over fsdp.

  w: the device's shard of the weight, with logical `axes`. Shards over tensor stay shards. first_stage: see the
  function `first_stage`. The derivative sums the gradients of the weight over fsdp and context, and returns the
  device's own shard of the sum. Each shard of context computes its part of T.
  """
  context, rules = num_shards(CONTEXT), [PARAMETER_RULES[axis] for axis in axes]
  dim = next(dim for dim, rule in enumerate(rules) if FSDP in rule)
  over = (FSDP, CONTEXT) if context > 1 and w.shape[dim] % context == 0 else (FSDP,)
  gather = functools.partial(gather_weight, dim=dim, over=over, first_stage=first_stage)
  whole = [TENSOR if TENSOR in rule else None for rule in rules]
  shard = [CONTEXT if i == dim and CONTEXT in over else entry for i, entry in enumerate(whole)]
  if context == 1:
    w = on_shards((TENSOR,), gather, PartitionSpec(*shard), PartitionSpec(*whole), w)
    return run(x, w)
  # The gathered weight has a dim of context, so that the gradients of its copies are added by the reduce-scatter only.
  copies = PartitionSpec(CONTEXT, *whole)
  w = on_shards((TENSOR, CONTEXT), lambda w: gather(w)[None], PartitionSpec(*shard), copies, w)
  length = PartitionSpec(None, CONTEXT)
  return on_shards((CONTEXT,), lambda x, w: run(x, w[0]), (length, PartitionSpec(CONTEXT)), length, x, w)


def gather_weight(w: jax.Array, dim: int, over: tuple[str, ...], first_stage: int) -> jax.Array:
  """Returns the shards `w` of a weight, gathered along `dim` over the mesh axes `over`."""
  if first_stage == 1:
    return jax.lax.all_gather(w, over, axis=dim, tiled=True)
  if CONTEXT in over:
    w = jax.lax.all_gather(w, CONTEXT, axis=dim, tiled=True)
  positions = np.arange(jax.lax.axis_size(FSDP)).reshape(-1, first_stage)
  for groups in (positions, positions.T):
    w = jax.lax.all_gather(w, FSDP, axis=dim, tiled=True, axis_index_groups=groups.tolist())
  return w


def on_shards(
  axes: tuple[str, ...], run: Callable[..., jax.Array], given: Any, result: PartitionSpec, *arrays: Any
) -> jax.Array:
  """Returns run(*arrays), computed by each shard of the mesh `axes` on its own parts.

  given, result: specs of the arrays and of the result over `axes`. The compiler's own partitioning would gather the
  arrays over `axes` first, for a collective over fsdp and for a reshape that moves the sharded dim.
  """
  if num_shards(*axes) == 1:
    return run(*arrays)
  return jax.shard_map(run, axis_names=set(axes), in_specs=given, out_specs=result, check_vma=False)(*arrays)


def first_stage(mesh: Mesh, width: int) -> int:
  """Returns how many neighbours along fsdp gather a weight in a first stage, before their groups do; 1: one stage.

  width: D, which fsdp shards. If shards do not fill tiles of memory, the TPU compiler turns some gathers, and the sums
  in their derivatives, into all-reduces, which send twice as much. It does not if they have two stages: along lines of
  devices, then across these lines. Without wraparounds, a line passes its links twice, and one stage is as fast or
  faster.
  """
  coords = _fsdp_coords(mesh)
  fills_tiles = width // mesh.shape[FSDP] % _TILE_ROWS == 0
  one_stage = fills_tiles or not _has_wraparounds(mesh) or _dims(coords) <= 1
  return 1 if one_stage else _length_of_line(coords)


def _has_wraparounds(mesh: Mesh) -> bool:
  chip = chips.find(mesh.devices.flat[0].device_kind)
  devices = mesh.devices.size // len(_slices(mesh.devices.flat))
  return chip is not None and chip.has_wraparounds(devices)


def _fsdp_coords(mesh: Mesh) -> list[Any]:
  """Returns where the devices along fsdp lie in their slice. Empty if they do not say so, or are in several slices."""
  line = np.moveaxis(mesh.devices, mesh.axis_names.index(FSDP), -1).reshape(-1, mesh.shape[FSDP])[0]
  coords = [getattr(device, "coords", None) for device in line]
  return [] if None in coords or len(_slices(line)) > 1 else coords


def _length_of_line(coords: list[Any]) -> int:
  """Returns the largest number of first devices that lie on one line and divide all devices, but not all of them."""
  return max((n for n in range(1, len(coords)) if len(coords) % n == 0 and _dims(coords[:n]) <= 1), default=1)


def _dims(coords: list[Any]) -> int:
  """Returns the number of dims in which the devices lie apart."""
  return sum(len(set(values)) > 1 for values in zip(*coords))


def _slices(devices: Iterable[jax.Device]) -> set[int]:
  return {getattr(device, "slice_index", 0) for device in devices}


def num_shards(*axes: str) -> int:
  """Returns the number of parts into which the mesh of the current trace splits `axes`; 1 outside a mesh."""
  mesh = jax.sharding.get_abstract_mesh()
  return 1 if mesh.empty else math.prod(mesh.shape[axis] for axis in axes)


def check_replication(weights: list[tuple[Any, jax.ShapeDtypeStruct]]) -> None:
  """Raises ConfigError if every device of a slice holds more than MOST_REPLICATED of all parameters.

  weights: with their tree paths and shardings. The check applies only to a mesh that shards parameters. The most common
  cause is a dim that no rule covers.
  """
  mesh = weights[0][1].sharding.mesh
  num_devices = math.prod(mesh.shape[axis] for axis in (FSDP, TENSOR, CONTEXT))
  if num_devices == 1:
    return
  total = sum(leaf.size for _, leaf in weights)
  replicated = [(jax.tree_util.keystr(path), w.size) for path, w in weights if w.sharding.is_fully_replicated]
  share = sum(size for _, size in replicated) / total
  if share > MOST_REPLICATED:
    worst = ", ".join(f"{name} ({size:,})" for name, size in sorted(replicated, key=lambda item: -item[1])[:3])
    raise ConfigError(
      f"{share:.1%} of the parameters would be replicated on each of {num_devices} devices, more than "
      f"{MOST_REPLICATED:.1%}: {worst}. Choose parallelisms that divide them."
    )
