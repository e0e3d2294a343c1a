"""The sums of one share, where each slice is a JAX world of its own: one program, or several, one after the other.

With several programs the exchange between slices overlaps the backward pass: the first gradients travel while the next
program computes. Together the programs do the operations of `step.loss_and_grads`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from input_pipeline.batch import Batch
from trainer.config.schema import OptimizerSection
from trainer.models import stages
from trainer.models.decoder import DecoderFunctions, Params
from trainer.program.step import Sums, head_losses, loss_and_grads
from worlds.exchange import Part

Scalars = tuple[jax.Array, jax.Array, jax.Array]  # loss, z_loss, weight: see Sums


class ShareSums:
  """The compiled programs of a share. parts: its gradients as ShapeDtypeStructs, in the order of their computation."""

  def __init__(
    self, run: Callable[[Any, Any], tuple[Any, list[Any]]], parts: list[Part], options: Any, *, adds: bool
  ) -> None:
    """run(params, batch): the scalars, and the tree of each part. adds: `add` will be called."""
    self.parts = parts
    self._run = run
    trees = {id(part.tree): part.tree for part in parts if adds}  # stages of layers share one
    sum_of = jax.jit(functools.partial(jax.tree.map, jnp.add))
    self._add = {key: sum_of.lower(tree, tree).compile(options) for key, tree in trees.items()}

  def __call__(self, params: Any, batch: Any) -> tuple[Any, list[Part]]:
    """Starts the programs of a share, without waiting, and returns its scalars and its gradients, float32."""
    scalars, trees = self._run(params, batch)
    return scalars, [Part(tree, part.first) for tree, part in zip(trees, self.parts, strict=True)]

  def add(self, shares: Sequence[Sequence[Part]]) -> list[Part]:
    """Returns the sums of the gradients of several shares, from left to right."""
    return [
      Part(functools.reduce(self._add[id(part.tree)], (other.tree for other in same)), part.first)
      for part, same in zip(self.parts, zip(*shares, strict=True), strict=True)
    ]


@dataclasses.dataclass(frozen=True)
class OneProgram:
  """One program that computes all sums of a share. The exchange begins when the program ends."""

  sums: Callable[[Params, Batch], Sums]  # `step.loss_and_grads` of the model

  def compile(self, params: Params, batch: Batch, grads: Params, options: Any, *, adds: bool) -> ShareSums:
    """Returns the compiled program for an abstract share. grads: ShapeDtypeStructs with shardings."""
    chosen: Any = None  # by the compiler
    shardings = Sums(jax.tree.map(lambda leaf: leaf.sharding, grads), chosen, chosen, chosen)
    compiled = jax.jit(self.sums, out_shardings=shardings).lower(params, batch).compile(options)

    def run(params: Params, batch: Batch) -> tuple[Scalars, list[Any]]:
      sums = compiled(params, batch)
      return (sums.loss, sums.z_loss, sums.weight), [sums.grads]

    return ShareSums(run, [Part(grads)], options, adds=adds)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Begun:
  """A share after `begin`: the gradients of the layers and of the embedding table are not computed yet.

  grads: the gradients of the final norm and of an untied head, float32. dx: the gradient of the stream after the last
  layer, [B, T, D]. tied: the gradient of a tied head, in weight_dtype. positions, saved: what the derivative of the
  layers needs. earlier: the gradients of all micro-batches but the last one; None if there is one.
  """

  scalars: Scalars
  grads: Params
  dx: jax.Array
  tied: jax.Array | None
  positions: Sequence[jax.Array]
  saved: Any
  earlier: Params | None


def begin(model: DecoderFunctions, cfg: OptimizerSection, params: Params, batch: Batch) -> Begun:
  """Returns the losses of the micro-batches [A, B, T], and the first gradients: their sums."""
  last: Batch = jax.tree.map(lambda x: x[-1], batch)
  earlier = None
  if batch.tokens.shape[0] > 1:
    earlier = loss_and_grads(model, cfg, params, jax.tree.map(lambda x: x[:-1], batch))
  decoder = model.merge(params)
  head = "lm_head" if "lm_head" in params else "embedding"
  tokens, *places = decoder.arranged(last.tokens, last.positions, last.segment_ids)
  positions = decoder.positions(*places)
  x_BTD, saved = stages.forward(decoder, decoder.embed(tokens), positions)

  def losses(x_BTD: jax.Array, norm: Params, head_VD: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    normed = model.merge(params | {"final_norm": norm}).normed(x_BTD)
    loss, z_loss = head_losses(model, cfg, normed, head_VD, last)
    return loss + z_loss, (loss, z_loss)

  differentiate = jax.value_and_grad(losses, argnums=(0, 1, 2), has_aux=True)
  (_, (loss, z_loss)), (dx, norm, head_grad) = differentiate(x_BTD, params["final_norm"], params[head])
  scalars = (loss, z_loss, jnp.sum(last.weights, dtype=jnp.float32))
  grads = {"final_norm": norm} if head == "embedding" else {"final_norm": norm, head: head_grad}
  grads = jax.tree.map(lambda grad: grad.astype(jnp.float32), grads)
  rest = None
  if earlier is not None:
    scalars = jax.tree.map(jnp.add, (earlier.loss, earlier.z_loss, earlier.weight), scalars)
    grads = {name: jax.tree.map(jnp.add, earlier.grads[name], grad) for name, grad in grads.items()}
    rest = {name: grad for name, grad in earlier.grads.items() if name not in grads}
  return Begun(scalars, grads, dx, head_grad if head == "embedding" else None, positions, saved, rest)


def layers(
  model: DecoderFunctions, count: int, params: Params, begun: Begun, dx: jax.Array, first: jax.Array
) -> tuple[jax.Array, Params]:
  """Returns the gradient of the stream before the layers first to first + count - 1, and the gradients of these."""
  dx, grads = stages.backward(model.merge(params), begun.saved, begun.positions, dx, first, count)
  if begun.earlier is not None:
    part = lambda array: jax.lax.dynamic_slice_in_dim(array, first, count)
    grads = jax.tree.map(jnp.add, jax.tree.map(part, begun.earlier["layers"]), grads)
  return dx, {"layers": grads}


def finish(model: DecoderFunctions, params: Params, begun: Begun, dx: jax.Array, tokens: jax.Array) -> Params:
  """Returns the gradient of the embedding table. dx: of the stream before the first layer. tokens: [A, B, T]."""

  def embed(table: jax.Array) -> jax.Array:
    decoder = model.merge(params | {"embedding": table})
    return decoder.embed(*decoder.arranged(tokens[-1]))

  (grad,) = jax.vjp(embed, params["embedding"])[1](dx)
  if begun.tied is not None:
    grad = grad + begun.tied
  grad = grad.astype(jnp.float32)
  return {"embedding": grad if begun.earlier is None else begun.earlier["embedding"] + grad}


@dataclasses.dataclass(frozen=True)
class Stages:
  """The sums of a share as several functions. The exchange begins when the first of them ends.

  `begin` computes the gradients of the head. `layers` computes the gradients of some layers; it is called from the last
  layers to the first. `finish` computes the gradient of the embedding table. firsts: the first layer of each call of
  `layers`.
  """

  begin: Callable[[Params, Batch], Begun]
  layers: Callable[[Params, Begun, jax.Array, jax.Array], tuple[jax.Array, Params]]
  finish: Callable[[Params, Begun, jax.Array, jax.Array], Params]
  firsts: Sequence[int]

  @classmethod
  def of(cls, model: DecoderFunctions, cfg: OptimizerSection, num_layers: int, least: int) -> Stages:
    """The programs of this model, whose layers are scanned, in at least `least` stages.

    All stages have as many layers, so that they are one program.
    """
    count = num_layers // next(n for n in range(least, num_layers + 1) if num_layers % n == 0)
    return cls(
      functools.partial(begin, model, cfg),
      functools.partial(layers, model, count),
      functools.partial(finish, model),
      range(num_layers - count, -1, -count),
    )

  def compile(self, params: Params, batch: Batch, grads: Params, options: Any, *, adds: bool) -> ShareSums:
    """Returns the compiled programs for an abstract share. grads: ShapeDtypeStructs with shardings."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, grads)
    begin, begun = _compiled(self.begin, _of_begun(batch, shardings), options, params, batch)
    stage: Any = (begun.dx.sharding, {"layers": shardings["layers"]})
    layers, (_, stage) = _compiled(
      self.layers, stage, options, params, begun, begun.dx, jax.ShapeDtypeStruct((), jnp.int32)
    )
    table: Any = {"embedding": shardings["embedding"]}
    finish, table = _compiled(self.finish, table, options, params, begun, begun.dx, batch.tokens)

    def run(params: Params, batch: Batch) -> tuple[Scalars, list[Any]]:
      begun = begin(params, batch)
      trees, dx = [begun.grads], begun.dx
      for first in self.firsts:
        dx, of_layers = layers(params, begun, dx, np.int32(first))
        trees.append(of_layers)
      return begun.scalars, [*trees, finish(params, begun, dx, batch.tokens)]

    parts = [Part(begun.grads), *(Part(stage, first) for first in self.firsts), Part(table)]
    return ShareSums(run, parts, options, adds=adds)


def _of_begun(batch: Batch, grads: Params) -> Begun:
  """Returns the shardings of the result of `begin`. None: the compiler chooses."""
  first = {name: part for name, part in grads.items() if name not in ("layers", "embedding")}
  rest = {name: part for name, part in grads.items() if name not in first}
  tied = None if "lm_head" in grads else grads["embedding"]
  chosen: Any = None
  return Begun(chosen, first, chosen, tied, chosen, chosen, rest if batch.tokens.shape[0] > 1 else None)


def _compiled(function: Callable[..., Any], shardings: Any, options: Any, *args: Any) -> tuple[Callable[..., Any], Any]:
  """Returns the compiled function, and its result as ShapeDtypeStructs. shardings: of the result."""
  lowered = jax.jit(function, out_shardings=shardings).lower(*args)
  compiled = lowered.compile(options)
  of = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
  return compiled, jax.tree.map(of, lowered.out_info, compiled.output_shardings)
