"""The scanned layers of the decoder and their derivative as separate functions, which can be programs of their own.

The gradients of some layers are then results that the host can read while the next layers are computed. Every layer is
computed once and its derivative once, with the same operations as in one program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from trainer.models.decoder import Decoder, Params
from trainer.parallel.sharding import in_parts_over_fsdp


@dataclasses.dataclass(frozen=True, eq=False)
class _Origin:
  """How to build a derivative: its structure, and of each of its arrays the index of the input that it is, or None."""

  tree: Any
  inputs: tuple[int | None, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Saved:
  """What the derivative of a layer needs besides the inputs that its caller still has."""

  arrays: list[jax.Array]
  origin: _Origin = dataclasses.field(metadata={"static": True})

  @classmethod
  def of(cls, derivative: Any, inputs: Any) -> Saved:
    """The arrays of a function of jax.vjp, without `inputs`."""
    arrays, tree = jax.tree.flatten(derivative)
    known = {id(array): index for index, array in enumerate(jax.tree.leaves(inputs))}
    origin = _Origin(tree, tuple(known.get(id(array)) for array in arrays))
    return cls([array for array in arrays if id(array) not in known], origin)

  def derivative(self, inputs: Any) -> Any:
    """The function of jax.vjp, with equal `inputs`."""
    saved, known = iter(self.arrays), jax.tree.leaves(inputs)
    return self.origin.tree.unflatten([next(saved) if i is None else known[i] for i in self.origin.inputs])


def forward(decoder: Decoder, x_BTD: jax.Array, positions: Sequence[jax.Array]) -> tuple[jax.Array, Any]:
  """Returns the stream after all layers of the decoder, and what `backward` needs of it."""

  def run(weights: Params, rows: Any, carried: None) -> tuple[jax.Array, Saved]:
    x, *positions = rows

    def one(x: jax.Array, weights: Params) -> tuple[jax.Array, Saved]:
      layer = lambda x, weights: decoder.run_layer(decoder.layers, x, weights, positions)
      x, derivative = jax.vjp(layer, x, weights)
      return x, Saved.of(derivative, (weights, positions))

    return jax.lax.scan(one, x, weights)

  return in_parts_over_fsdp(run, *decoder.layer_weights(), (x_BTD, *positions))


def backward(
  decoder: Decoder, saved: Any, positions: Sequence[jax.Array], dx_BTD: jax.Array, first: jax.Array, count: int
) -> tuple[jax.Array, Params]:
  """Returns the gradients of the stream before the layers first to first + count - 1, and of the weights of these.

  saved, positions: of `forward`. dx_BTD: the gradient of the stream after these layers. The gradients of weights are
  float32, because sums in bfloat16 over many micro-batches and slices lose bits.
  """

  def run(weights: Params, rows: Any, saved: Saved) -> tuple[jax.Array, Params]:
    dx, *positions = rows

    def one(dx: jax.Array, i: jax.Array) -> tuple[jax.Array, Params]:
      at = lambda array: jax.lax.dynamic_index_in_dim(array, i, keepdims=False, allow_negative_indices=False)
      own_weights, own_saved = jax.tree.map(at, (weights, saved))
      dx, grads = own_saved.derivative((own_weights, positions))(dx)
      return dx, jax.tree.map(lambda grad: grad.astype(jnp.float32), grads)

    layers = first + jnp.arange(count, dtype=jnp.int32)
    return jax.lax.scan(one, dx, layers, reverse=True)

  rows = (dx_BTD, *positions)
  return in_parts_over_fsdp(run, *decoder.layer_weights(), rows, saved, returns_grads=True)
