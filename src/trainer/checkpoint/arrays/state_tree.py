"""State pytrees as flat dicts {name: array}, the form that every backup stores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax


def flatten(tree: Any) -> dict[str, Any]:
  """{name: leaf} in tree order. A name is the path joined by dots: "params.layers.mlp.wi_0", "opt_state.0.mu.scale".

  Leaves are jax.Arrays or ShapeDtypeStructs. Raises ValueError on typed PRNG keys, which have no bytes of their own.
  """
  flat: dict[str, Any] = {}
  for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    if name in flat:
      raise ValueError(f"two leaves of the state are both named {name!r}: rename one, names are what is stored")
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      raise ValueError(f"{name} is a typed PRNG key, which cannot be stored: keep jax.random.key_data of it instead")
    flat[name] = leaf
  return flat


def unflatten(like: Any, flat: Mapping[str, Any]) -> Any:
  """The tree with the structure of `like` and the leaves flat[name]."""
  return jax.tree.unflatten(jax.tree.structure(like), [flat[name] for name in flatten(like)])


def describe(arrays: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
  """{name: {"shape", "dtype"}}, as JSON, of arrays or ShapeDtypeStructs."""
  return {name: {"shape": list(x.shape), "dtype": str(x.dtype)} for name, x in arrays.items()}


def state_bytes(abstract: Any) -> int:
  """Bytes of one full copy of the state, whatever its sharding."""
  return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(abstract))
