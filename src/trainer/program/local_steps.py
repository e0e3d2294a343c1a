"""A round of local steps as pure functions: what a replica adds to the round, and the outer step (docs/local_steps.md).

A replica takes several steps alone, from the state of the round. Then the weights and everything else that its steps
have changed are averaged over the replicas, so between two rounds the state is the same on all slices.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer.checkpoint.arrays import state_tree
from trainer.config.errors import ConfigError
from trainer.config.schema import OptimizerSection
from trainer.models.decoder import DecoderFunctions, Params
from trainer.program.state import TrainState
from trainer.program.step import MicroBatches, TrainStep
from worlds.exchange import Part

Small = Sequence[Any]  # loads of experts and counts of optimizer steps, float32: they never travel in another type


def outer_optimizer(cfg: OptimizerSection) -> optax.GradientTransformation | None:
  """The outer step of a run with local steps, for weights in float32; None: the run has no local steps."""
  if not cfg.has_local_steps:
    return None
  return optax.sgd(cfg.outer_learning_rate, momentum=cfg.outer_momentum or None, nesterov=True)


def end_of_round(cfg: OptimizerSection, step: int, steps: int) -> int:
  """The last step of the round that follows `step` completed steps. Rounds end at multiples of local_steps, so a run
  that resumes with another value begins with a shorter round; the last round of the run may be shorter too."""
  return min(step - step % cfg.local_steps + cfg.local_steps, steps)


@dataclasses.dataclass(frozen=True)
class Averages:
  """How each array of a state is averaged over `replicas`: by whether a weight is a load of experts, and whether an
  array of the optimizer is a moment (floating) or a count (integer), in the order of the leaves."""

  replicas: int
  is_load: tuple[bool, ...]
  is_moment: tuple[bool, ...]

  @classmethod
  def of(cls, abstract: TrainState, model: DecoderFunctions, replicas: int) -> Averages:
    """Raises ConfigError if an array of the optimizer's state has no mean."""
    axes = jax.tree.leaves(model.logical_axes(), is_leaf=lambda x: isinstance(x, tuple))
    for name, leaf in state_tree.flatten(abstract.opt_state).items():
      if not jnp.issubdtype(leaf.dtype, jnp.floating) and not jnp.issubdtype(leaf.dtype, jnp.signedinteger):
        raise ConfigError(
          f"local_steps: the state of the optimizer has {name} of type {leaf.dtype}, which cannot be averaged over "
          "replicas: only floating and signed numbers can.\nSet local_steps=1, outer_learning_rate=1 and "
          "outer_momentum=0, or choose another optimizer."
        )
    kinds = (jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(abstract.opt_state))
    return cls(replicas, tuple("load" in names for names in axes), tuple(kinds))

  def contribution(self, start: TrainState, end: TrainState) -> tuple[dict[str, list[Any]], Small, jax.Array]:
    """What a replica adds to the round that began with the state `start`, float32: its outer gradients and its moments;
    the small arrays; and the squared norm of the outer gradients."""
    deltas, loads = list[Any](), list[Any]()
    moments, counts = list[Any](), list[Any]()
    for old, new, is_load in zip(*map(jax.tree.leaves, (start.params, end.params)), self.is_load, strict=True):
      (loads if is_load else deltas).append(_f32(new) if is_load else _f32(old) - _f32(new))
    for old, new, is_moment in zip(
      *map(jax.tree.leaves, (start.opt_state, end.opt_state)), self.is_moment, strict=True
    ):
      # Counts differ from replica to replica only if one has skipped an update.
      (moments if is_moment else counts).append(_f32(new) if is_moment else _f32(new - old))
    return {"deltas": deltas, "moments": moments}, [*loads, *counts], _squares(deltas)

  def outer_step(
    self,
    outer: optax.GradientTransformation,
    start: TrainState,
    sums: dict[str, list[Any]],
    small: Small,
    steps: Any,
    skipped: Any,
  ) -> tuple[TrainState, jax.Array]:
    """Returns the state after the round, and the squared norm of the mean outer gradient. sums, small: of the
    contributions of all replicas. steps: of the round. skipped: see TrainState."""
    means = lambda arrays: iter([array / self.replicas for array in arrays])
    deltas, moments, small_means = means(sums["deltas"]), means(sums["moments"]), means(small)
    weights, tree = jax.tree.flatten(start.params)
    gradients = [
      jnp.zeros(weight.shape, jnp.float32) if is_load else next(deltas)
      for weight, is_load in zip(weights, self.is_load)
    ]
    updates, trace = outer.update(tree.unflatten(gradients), start.outer)
    params = [
      next(small_means) if is_load else (_f32(weight) + update).astype(weight.dtype)
      for weight, update, is_load in zip(weights, jax.tree.leaves(updates), self.is_load, strict=True)
    ]
    of_optimizer, structure = jax.tree.flatten(start.opt_state)
    opt_state = [
      next(moments).astype(old.dtype) if is_moment else old + jnp.round(next(small_means)).astype(old.dtype)
      for old, is_moment in zip(of_optimizer, self.is_moment, strict=True)
    ]
    state = TrainState(
      step=start.step + steps,
      params=tree.unflatten(params),
      opt_state=structure.unflatten(opt_state),
      skipped=skipped,
      outer=trace,
    )
    return state, _squares(gradients)


def _f32(array: jax.Array) -> jax.Array:
  return array.astype(jnp.float32)


def _squares(arrays: Sequence[jax.Array]) -> jax.Array:
  return functools.reduce(jnp.add, [jnp.sum(jnp.square(array)) for array in arrays])


class Contributions:
  """The sums of what the replicas of a slice add to a round. As ShareSums for gradients: `parts`, `add`."""

  def __init__(self, abstract: dict[str, list[Any]], options: Any, *, adds: bool) -> None:
    """abstract: ShapeDtypeStructs with shardings. adds: `add` will be called."""
    self.parts = [Part(abstract)]
    added = jax.jit(functools.partial(jax.tree.map, jnp.add))
    self._add = added.lower(abstract, abstract).compile(options) if adds else None

  def add(self, replicas: Sequence[Sequence[Part]]) -> list[Part]:
    """Returns the sum of the contributions of several replicas, from left to right."""
    assert self._add is not None
    return [Part(functools.reduce(self._add, (part.tree for (part,) in replicas)))]


@dataclasses.dataclass(frozen=True)
class RoundPrograms:
  """The compiled programs of a slice that takes part in rounds of local steps."""

  begin: Callable[[TrainState], TrainState]  # a copy of the state for a replica, without the outer momentum
  step: TrainStep  # of a replica; donates its state
  contribution: Callable[[TrainState, TrainState], tuple[Any, Small, Any]]  # donates the second state
  outer_step: Callable[..., tuple[TrainState, jax.Array]]  # donates the first state
  abstract: dict[str, list[Any]]  # of a contribution, as ShapeDtypeStructs
  small: Small  # the same of the small arrays
  sums: Contributions
  replicas: int
  evaluate: Callable[[Params, MicroBatches], tuple[jax.Array, jax.Array]] | None
  checksum: Callable[[Params], jax.Array]
  checks: None = None  # there is no witness


def compile_round(
  averages: Averages,
  outer: optax.GradientTransformation,
  train_step: TrainStep,
  abstract: tuple[TrainState, MicroBatches, Any],
  mesh: Mesh,
  options: Any,
  *,
  adds: bool,
) -> dict[str, Any]:
  """Returns the programs of a round by their names in RoundPrograms. abstract: the state, the batch of a replica and
  the values of the schedule. adds: whether a slice has several replicas."""
  state, batch, values = abstract
  inner = dataclasses.replace(state, outer=None)
  place = lambda tree: jax.tree.map(lambda leaf: leaf.sharding, tree)
  one = NamedSharding(mesh, PartitionSpec())
  number = lambda dtype: jax.ShapeDtypeStruct((), dtype, sharding=one)
  of_weights = lambda leaves, chosen: [
    jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=leaf.sharding)
    for leaf, is_chosen in zip(jax.tree.leaves(leaves), chosen, strict=True)
    if is_chosen
  ]
  not_load, is_count = ([not each for each in kinds] for kinds in (averages.is_load, averages.is_moment))
  sums = {"deltas": of_weights(state.params, not_load), "moments": of_weights(state.opt_state, averages.is_moment)}
  small = [*of_weights(state.params, averages.is_load), *of_weights(state.opt_state, is_count)]

  def begin(state: TrainState) -> TrainState:
    return dataclasses.replace(jax.tree.map(jnp.copy, state), outer=None)

  def compiled(function: Callable[..., Any], out: Any, *args: Any, donated: tuple[int, ...] = ()) -> Any:
    return jax.jit(function, donate_argnums=donated, out_shardings=out).lower(*args).compile(options)

  with jax.set_mesh(mesh):
    return {
      "begin": compiled(begin, place(inner), state),
      "step": compiled(train_step, (place(inner), one), inner, batch, values, donated=(0,)),
      "contribution": compiled(averages.contribution, (place(sums), place(small), one), state, inner, donated=(1,)),
      "outer_step": compiled(
        functools.partial(averages.outer_step, outer),
        (place(state), one),
        *(state, sums, small, number(jnp.int32), number(jnp.int32)),
        donated=(0,),
      ),
      "abstract": sums,
      "small": small,
      "sums": Contributions(sums, options, adds=adds),
      "replicas": averages.replicas,
    }
