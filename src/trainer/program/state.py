"""The training state: the input and output of a step, and the content of a checkpoint."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer.models.decoder import DecoderFunctions, Params
from trainer.parallel import sharding


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """What one optimizer step changes.

  step: int32 [], completed steps, skipped steps included. params: the weights. opt_state: the optimizer's state.
  skipped: int32 [], number of non-finite steps in a row up to now. outer: of the outer optimizer, with the momentum of
  the outer steps (`local_steps.py`); None: the run has no local steps.
  """

  step: jax.Array
  params: Params
  opt_state: Any
  skipped: jax.Array
  outer: Any = None


def create(
  model: DecoderFunctions,
  optimizer: optax.GradientTransformation,
  outer: optax.GradientTransformation | None,
  key: jax.Array,
) -> TrainState:
  """Returns a fresh state with weights drawn from `key`. outer: the outer optimizer, if there is one. Can be traced."""
  return with_params(optimizer, outer, model.init(key))


def with_params(
  optimizer: optax.GradientTransformation, outer: optax.GradientTransformation | None, params: Params
) -> TrainState:
  """Returns a fresh state with these weights. Can be traced."""
  zero = jnp.zeros((), jnp.int32)
  of_outer = None
  if outer is not None:
    of_outer = outer.init(jax.tree.map(lambda weight: weight.astype(jnp.float32), params))
  return TrainState(step=zero, params=params, opt_state=optimizer.init(params), skipped=zero, outer=of_outer)


def abstract(
  model: DecoderFunctions,
  optimizer: optax.GradientTransformation,
  mesh: Mesh,
  outer: optax.GradientTransformation | None = None,
) -> TrainState:
  """Returns the state as ShapeDtypeStructs with their shardings on `mesh`.

  Raises ConfigError if the size of a weight does not divide, or if too many parameters would be replicated inside a
  slice.
  """
  shapes = jax.eval_shape(lambda: create(model, optimizer, outer, jax.random.key(0)))
  map_with_path = jax.tree_util.tree_map_with_path
  placed = lambda leaf, spec: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

  def place_weight(path: Any, leaf: jax.ShapeDtypeStruct, axes: tuple[str, ...]) -> jax.ShapeDtypeStruct:
    return placed(leaf, sharding.parameter_spec(axes, leaf.shape, mesh, jax.tree_util.keystr(path)))

  weights = jax.tree_util.tree_leaves_with_path(map_with_path(place_weight, shapes.params, model.logical_axes()))
  sharding.check_replication(weights)
  by_path = {_names(path): leaf for path, leaf in weights}
  by_shape: dict[tuple[int, ...], list[jax.ShapeDtypeStruct]] = {}
  for _, leaf in weights:
    by_shape.setdefault(leaf.shape, []).append(leaf)

  def place(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Shards an optimizer array like its weight: the weight whose path is the end of the array's path. Without such a
    path (in a list of arrays), like the weights of the same shape, if these are all sharded alike; else replicates."""
    names = _names(path)
    of_weight = (by_path[names[i:]] for i in range(len(names)) if names[i:] in by_path)
    alike = by_shape.get(leaf.shape, [])
    is_clear = len({weight.sharding for weight in alike}) == 1
    weight = next(of_weight, alike[0] if is_clear else None)
    return placed(leaf, PartitionSpec() if weight is None else _like(leaf.shape, weight))

  return map_with_path(place, shapes)


def checksum(tree: Any) -> jax.Array:
  """Returns the sum of the bits of all numbers, such as weights, each as a number, modulo 2^32: uint32 []. Trees that
  differ have the same one with a probability of 2^-32, and never if one bit differs. It depends on no order, so not on
  how the arrays are sharded."""
  return functools.reduce(jnp.add, [jnp.sum(_bits(leaf), dtype=jnp.uint32) for leaf in jax.tree.leaves(tree)])


def digest(tree: Any) -> jax.Array:
  """Returns two sums for each array, modulo 2^32: uint32 [arrays, 2]. The first is of the bits as numbers, each times
  an odd number that depends on its place: it changes if one bit differs, or if numbers change places. The second is
  the number of bits that are 1."""

  def one(array: jax.Array) -> jax.Array:
    bits, place = _bits(array), jnp.zeros(array.shape, jnp.uint32)
    for dim, size in enumerate(array.shape):
      place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, array.shape, dim)
    sums = jnp.sum(bits * (2 * place + 1), dtype=jnp.uint32), jnp.sum(jax.lax.population_count(bits), dtype=jnp.uint32)
    return jnp.stack(sums)

  return jnp.stack([one(array) for array in jax.tree.leaves(tree)])


def _bits(array: jax.Array) -> jax.Array:
  """Returns the bits of an array as uint32 numbers."""
  width = jnp.dtype(f"uint{8 * array.dtype.itemsize}")
  return jax.lax.bitcast_convert_type(array, width).astype(jnp.uint32)


def shardings(state: TrainState) -> TrainState:
  return jax.tree.map(lambda leaf: leaf.sharding, state)


def _like(shape: tuple[int, ...], weight: jax.ShapeDtypeStruct) -> PartitionSpec:
  """Returns the spec of an optimizer array of `shape` that belongs to `weight`.

  An array of the weight's shape has the weight's spec. Adafactor's averages lack one dim of the weight and keep the
  spec of the other dims: for the attention of a 405B model they take 2.4 GB. Every other array (adafactor's
  placeholders of one element) is replicated.
  """
  spec = weight.sharding.spec
  if shape == weight.shape:
    return spec
  full = (*spec, *[None] * (len(weight.shape) - len(spec)))
  for dim in range(len(weight.shape)):
    if shape == weight.shape[:dim] + weight.shape[dim + 1 :]:
      return PartitionSpec(*full[:dim], *full[dim + 1 :])
  return PartitionSpec()


def _names(path: Any) -> tuple[str, ...]:
  """Returns the dict keys of a tree path."""
  return tuple(str(entry.key) for entry in path if isinstance(entry, jax.tree_util.DictKey))
