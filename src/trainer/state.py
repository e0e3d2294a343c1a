"""The training state: what a step takes and gives, and what a checkpoint holds."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer import sharding
from trainer.models.decoder import DecoderFunctions, Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """step: int32 [], steps taken (skipped ones included). params: weights. opt_state: the optimizer's.
  skipped: int32 [], non-finite steps in a row up to now."""

  step: jax.Array
  params: Params
  opt_state: Any
  skipped: jax.Array


def create(model: DecoderFunctions, optimizer: optax.GradientTransformation, key: jax.Array) -> TrainState:
  """A fresh state with weights drawn from `key` (traceable)."""
  params = model.init(key)
  zero = jnp.zeros((), jnp.int32)
  return TrainState(step=zero, params=params, opt_state=optimizer.init(params), skipped=zero)


def abstract(
  model: DecoderFunctions, optimizer: optax.GradientTransformation, mesh: Mesh, tolerance: float
) -> TrainState:
  """The state's ShapeDtypeStructs with their shardings on `mesh`.

  Raises ValueError where a weight does not divide, or where more than the share `tolerance` of the parameters would
  be replicated inside a slice.
  """
  shapes = jax.eval_shape(lambda: create(model, optimizer, jax.random.key(0)))
  params, axes = shapes.params, model.logical_axes()
  specs = jax.tree_util.tree_map_with_path(
    lambda path, leaf, names: sharding.parameter_spec(names, leaf.shape, mesh, jax.tree_util.keystr(path)),
    params,
    axes,
  )
  named = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
  sharding.check_replication(params, named, tolerance)
  by_path = {
    _names(path): (leaf.shape, sh.spec)
    for (path, leaf), sh in zip(jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(named), strict=True)
  }

  def place(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """What the optimizer keeps of a weight has the weight's path at the end of its own, and is laid out like it."""
    names = _names(path)
    spec = PartitionSpec()
    for start in range(len(names)):
      if names[start:] in by_path:
        spec = _like(leaf.shape, *by_path[names[start:]])
        break
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

  return jax.tree_util.tree_map_with_path(place, shapes)


def shardings(state: TrainState) -> TrainState:
  """The shardings of an abstract or a real state."""
  return jax.tree.map(lambda leaf: leaf.sharding, state)


def _like(shape: tuple[int, ...], weight: tuple[int, ...], spec: PartitionSpec) -> PartitionSpec:
  """The spec of a moment of a weight: the weight's own, or that of the dims over which adafactor has not averaged.

  Adafactor's averages are no small things: of 405B's attention they are 2.4 GB. Anything else (adafactor's
  placeholders of one element) is replicated.
  """
  if shape == weight:
    return spec
  full = (*spec, *[None] * (len(weight) - len(spec)))
  for dim in range(len(weight)):
    if shape == weight[:dim] + weight[dim + 1 :]:
      return PartitionSpec(*full[:dim], *full[dim + 1 :])
  return PartitionSpec()


def _names(path: Any) -> tuple[str, ...]:
  """The dict keys of a tree path."""
  return tuple(str(entry.key) for entry in path if isinstance(entry, jax.tree_util.DictKey))
