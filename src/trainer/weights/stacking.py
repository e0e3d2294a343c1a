"""Converts between stacked layers, `layers.w` [L, ...], and separate layers, `layers.0.w` ... `layers.{L-1}.w`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from trainer.checkpoint.arrays import state_tree
from trainer.models.decoder import Params

NAME = re.compile(r"^((?:params\.)?layers)\.(\d+)\.(.+)$")  # of a weight of a separate layer


def as_stored(names: Iterable[str], abstract: Params) -> Params:
  """Returns `abstract` (ShapeDtypeStructs with shardings) with its layers stacked or separate as those in `names`."""
  layers, is_stacked = abstract["layers"], not any(map(NAME.match, names))
  if is_stacked == _are_stacked(abstract):
    return abstract
  if is_stacked:
    return {**abstract, "layers": jax.tree.map(lambda leaf: _stacked(leaf, len(layers)), layers["0"])}
  count = jax.tree.leaves(layers)[0].shape[0]
  return {**abstract, "layers": {str(i): jax.tree.map(_unstacked, layers) for i in range(count)}}


def convert(params: Params, abstract: Params) -> Params:
  """Returns `params` with the layers and shardings of `abstract`.

  Empties `params`, so that only one weight of all layers is in memory twice.
  """
  if _are_stacked(params) == _are_stacked(abstract):
    return params
  given, wanted = state_tree.flatten(params), state_tree.flatten(abstract)
  params.clear()
  done: dict[str, jax.Array] = {}
  for name, leaf in wanted.items():
    if name in given:
      done[name] = given.pop(name)
    elif name not in done and (match := NAME.match(name)):
      whole = given.pop(f"{match[1]}.{match[3]}")
      names = [f"{match[1]}.{i}.{match[3]}" for i in range(len(whole))]
      split = jax.jit(list, out_shardings=[wanted[layer].sharding for layer in names])
      done.update(zip(names, split(whole), strict=True))
    elif name not in done:
      weight = name.removeprefix("layers.")
      parts = [given.pop(f"layers.{i}.{weight}") for i in range(leaf.shape[0])]
      done[name] = jax.jit(jnp.stack, out_shardings=leaf.sharding)(parts)
  return state_tree.unflatten(abstract, done)


def _are_stacked(params: Params) -> bool:
  return "0" not in params["layers"]


def _stacked(leaf: jax.ShapeDtypeStruct, count: int) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct((count, *leaf.shape), leaf.dtype, sharding=_sharding(leaf, lambda spec: (None, *spec)))


def _unstacked(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=_sharding(leaf, lambda spec: spec[1:]))


def _sharding(leaf: jax.ShapeDtypeStruct, change: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> Sharding | None:
  """The sharding of `leaf` with another spec: the layers are not sharded."""
  if not isinstance(leaf.sharding, NamedSharding):
    return leaf.sharding
  return NamedSharding(leaf.sharding.mesh, PartitionSpec(*change(tuple(leaf.sharding.spec))))
