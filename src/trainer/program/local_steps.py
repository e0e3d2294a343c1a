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
from trainer.program.share_sums import ShareSums
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
  """How each array of a state is averaged over `replicas`. is_load: whether a weight is a load of experts, in the order
  of the leaves. optimizer: its state, abstract, with moments (floating arrays) and counts (integers)."""

  replicas: int
  is_load: tuple[bool, ...]
  optimizer: Any

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
    return cls(replicas, tuple("load" in names for names in axes), abstract.opt_state)

  @property
  def is_moment(self) -> list[bool]:
    return [bool(jnp.issubdtype(leaf.dtype, jnp.floating)) for leaf in jax.tree.leaves(self.optimizer)]

  def split(self, state: TrainState) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    """The leaves of a state, or what stands for them: weights, moments, loads of experts, counts."""
    of_kind = lambda tree, kinds, kind: [leaf for leaf, one in zip(jax.tree.leaves(tree), kinds) if one == kind]
    weights, loads = (of_kind(state.params, self.is_load, kind) for kind in (False, True))
    moments, counts = (of_kind(state.opt_state, self.is_moment, kind) for kind in (True, False))
    return weights, moments, loads, counts

  def kept(self, state: TrainState) -> TrainState:
    """What the end of a round needs of the state with which the round began: all but the moments."""
    return dataclasses.replace(state, opt_state=self.split(state)[-1])

  def contribution(self, kept: TrainState, end: TrainState) -> tuple[tuple[jax.Array, Small], list[Any]]:
    """What a replica adds to the round, float32, as ShareSums: the squared norm of its outer gradients, and the small
    arrays; its outer gradients and its moments. kept: see the method."""
    before = self.split(dataclasses.replace(kept, opt_state=()))[0]
    weights, moments, loads, counts = self.split(end)
    deltas = [_f32(old) - _f32(new) for old, new in zip(before, weights, strict=True)]
    # Counts differ from replica to replica only if one has skipped an update.
    counted = [_f32(new - old) for old, new in zip(kept.opt_state, counts, strict=True)]
    return (_squares(deltas), [*map(_f32, loads), *counted]), [{"deltas": deltas, "moments": [*map(_f32, moments)]}]

  def outer_step(
    self,
    outer: optax.GradientTransformation,
    kept: TrainState,
    sums: dict[str, list[Any]],
    small: Small,
    steps: Any,
    skipped: Any,
  ) -> tuple[TrainState, jax.Array]:
    """Returns the state after the round, and the squared norm of the mean outer gradient. sums, small: of the
    contributions of all replicas. steps: of the round. skipped: see TrainState."""
    means = lambda arrays: iter([array / self.replicas for array in arrays])
    deltas, moments, small_means = means(sums["deltas"]), means(sums["moments"]), means(small)
    weights, tree = jax.tree.flatten(kept.params)
    gradients = [
      jnp.zeros(weight.shape, jnp.float32) if is_load else next(deltas)
      for weight, is_load in zip(weights, self.is_load)
    ]
    updates, trace = outer.update(tree.unflatten(gradients), kept.outer)
    params = [
      next(small_means) if is_load else (_f32(weight) + update).astype(weight.dtype)
      for weight, update, is_load in zip(weights, jax.tree.leaves(updates), self.is_load, strict=True)
    ]
    of_optimizer, structure = jax.tree.flatten(self.optimizer)
    counts = iter([old + jnp.round(next(small_means)).astype(old.dtype) for old in kept.opt_state])
    opt_state = [
      next(moments).astype(leaf.dtype) if is_moment else next(counts)
      for leaf, is_moment in zip(of_optimizer, self.is_moment, strict=True)
    ]
    state = TrainState(
      step=kept.step + steps,
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


@dataclasses.dataclass(frozen=True)
class RoundPrograms:
  """The compiled programs of a slice that takes part in rounds of local steps."""

  step: TrainStep  # of a replica; donates its state, which is without the outer momentum
  sums: ShareSums  # of (`Averages.kept`, the last state of a replica, which is donated)
  outer_step: Callable[..., tuple[TrainState, jax.Array]]  # donates the first state
  averages: Averages
  abstract: dict[str, list[Any]]  # of a contribution, as ShapeDtypeStructs
  small: Small  # the same of the small arrays
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
  inner, kept = dataclasses.replace(state, outer=None), averages.kept(state)
  place = lambda tree: jax.tree.map(lambda leaf: leaf.sharding, tree)
  one = NamedSharding(mesh, PartitionSpec())
  number = lambda dtype: jax.ShapeDtypeStruct((), dtype, sharding=one)
  as_f32 = lambda leaves: [jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=leaf.sharding) for leaf in leaves]
  weights, moments, loads, counts = map(as_f32, averages.split(state))
  sums, small = {"deltas": weights, "moments": moments}, [*loads, *counts]

  def compiled(function: Callable[..., Any], out: Any, *args: Any, donated: tuple[int, ...]) -> Any:
    return jax.jit(function, donate_argnums=donated, out_shardings=out).lower(*args).compile(options)

  with jax.set_mesh(mesh):
    added = compiled(averages.contribution, ((one, place(small)), [place(sums)]), kept, inner, donated=(1,))
    return {
      "step": compiled(train_step, (place(inner), one), inner, batch, values, donated=(0,)),
      "sums": ShareSums(added, [Part(sums)], options, adds=adds),
      "outer_step": compiled(
        functools.partial(averages.outer_step, outer),
        (place(state), one),
        *(kept, sums, small, number(jnp.int32), number(jnp.int32)),
        donated=(0,) if mesh.devices.flat[0].platform == "cpu" else (0, 1),  # there they are the exchange's memory
      ),
      "averages": averages,
      "abstract": sums,
      "small": small,
    }
