"""Optimizers and learning-rate schedules, from optax.

Each optimizer is built for a learning rate of 1. `apply_gradients` multiplies its updates by the schedule's value at
`state.step`, so the learning rate depends only on the step, not on how often the optimizer ran.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from optax import contrib

from trainer.checkpoint import meta
from trainer.checkpoint.arrays import state_tree
from trainer.config.errors import ConfigError
from trainer.config.schema import OptimizerSection


@dataclasses.dataclass(frozen=True)
class Schedule:
  """rate(step, values): the learning rate, float32, at a step (int32 scalar, from 0). values: its numbers, float32 [n],
  which are an input of the program, so that runs with other rates, warm-ups and decays need not compile; None: it has
  none."""

  rate: Callable[[jax.Array, Any], jax.Array]
  values: np.ndarray | None = None

  def at(self, step: int) -> jax.Array:
    return self.rate(jnp.int32(step), self.values)

  def placed(self, mesh: Mesh) -> Any:
    """The values on all devices of the mesh. Every process of the mesh calls."""
    if self.values is None:
      return None
    return jax.make_array_from_callback(self.values.shape, _replicated(mesh), self.values.__getitem__)

  def abstract(self, mesh: Mesh) -> Any:
    """What `placed` returns, as a ShapeDtypeStruct."""
    if self.values is None:
      return None
    return jax.ShapeDtypeStruct(self.values.shape, jnp.float32, sharding=_replicated(mesh))


def _replicated(mesh: Mesh) -> NamedSharding:
  return NamedSharding(mesh, PartitionSpec())


@dataclasses.dataclass(frozen=True)
class UserOptimizer:
  """What the caller of the library gives in the place of the configuration's schedule and optimizer (docs/library.md).

  schedule: step (int32 scalar, from 0) -> the factor of the optimizer's updates. None: that of the configuration, or
  with an optimizer 1, because its updates include a learning rate.
  """

  schedule: Callable[[Any], Any] | None = None
  optimizer: optax.GradientTransformation | None = None

  def replace(
    self, optimizer: optax.GradientTransformation, rate: Schedule, abstract: Callable[[], Any], logical_axes: Any
  ) -> tuple[optax.GradientTransformation, Schedule]:
    """The optimizer and the schedule that the program gives; where it gives none, `optimizer` and `rate`. abstract:
    returns the abstract weights.

    Raises ConfigError if what it gives cannot be part of a compiled step whose state is saved and sharded.
    """
    if self.optimizer is not None:
      optimizer = _checked(self.optimizer, abstract(), logical_axes)
      rate = Schedule(lambda step, values: jnp.float32(1))
    if self.schedule is not None:
      rate = _checked_schedule(self.schedule)
    return optimizer, rate

  def lines(self) -> list[str]:
    given = [name for name in ("schedule", "optimizer") if getattr(self, name) is not None]
    return [f"The program gives the {' and the '.join(given)}: the keys for it have no effect."] * bool(given)

  def identity(self, opt_state: Any) -> dict[str, Any]:
    """What a resume compares: the arrays of the optimizer's state. opt_state: abstract or real."""
    if self.optimizer is None:
      return {}
    return {meta.OPTIMIZER: {name: _kind(leaf) for name, leaf in state_tree.flatten(opt_state).items()}}


NO_OVERRIDES = UserOptimizer()


def _checked_schedule(given: Callable[[Any], Any]) -> Schedule:
  def rate(step: jax.Array, values: None = None) -> jax.Array:
    with jax.numpy_dtype_promotion("standard"):
      value = jnp.asarray(given(step))
    if jnp.iscomplexobj(value):
      raise TypeError("it returns a complex number")
    return value.astype(jnp.float32)

  example = "Give a function of the step that JAX can trace, such as optax.constant_schedule(3e-4)"
  if not callable(given):
    raise ConfigError(f"schedule={given!r}: is not a function.\n{example}.")
  try:
    found = jax.eval_shape(rate, jax.ShapeDtypeStruct((), jnp.int32))
  except Exception as error:
    raise ConfigError(f"schedule: cannot be traced: {_reason(error)}\n{example}.") from error
  if found.shape:
    raise ConfigError(f"schedule: returns an array of shape {found.shape}, not one number.\n{example}.")
  return Schedule(rate)


def _checked(given: optax.GradientTransformation, params: Any, logical_axes: Any) -> optax.GradientTransformation:
  """`given` as a step calls it. Raises ConfigError unless its state is a tree of arrays that an update keeps."""
  if not isinstance(given, optax.GradientTransformation):
    raise ConfigError(
      f"optimizer={given!r}: is not an optax.GradientTransformation.\nGive for example optax.adamw(3e-4)."
    )
  optimizer = _in_float32(given)
  grads = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), params)
  remedy = (
    "Give a transformation whose state is a tree of arrays, and whose update needs only gradients, state and weights."
  )
  try:
    before = jax.eval_shape(optimizer.init, params)
    state_tree.flatten(before)
  except Exception as error:
    raise ConfigError(f"optimizer: its state cannot be saved and sharded: {_reason(error)}\n{remedy}") from error
  try:
    updates, after = jax.eval_shape(optimizer.update, grads, before, params)
  except Exception as error:
    raise ConfigError(
      f"optimizer: update(gradients, state, weights) cannot be traced: {_reason(error)}\n{remedy}"
    ) from error
  for what, old, new in (("its state", before, after), ("the weights", grads, updates)):
    if differ := _differences(old, new):
      raise ConfigError(f"optimizer: its update returns other arrays than {what}: {differ}\n{remedy}")

  def update(grads: Any, state: Any, params: Any = None) -> Any:
    updates, state = optimizer.update(grads, state, params)
    # Loads of experts are counts: a decay or noise of the program's own would change them.
    still = lambda update, axes: jnp.zeros_like(update) if "load" in axes else update
    return jax.tree.map(still, updates, logical_axes), state

  return optax.GradientTransformation(optimizer.init, update)


def _differences(old: Any, new: Any) -> str:
  """The first arrays that differ between two trees of arrays; "" if none does."""
  one, other = ({name: _kind(leaf) for name, leaf in state_tree.flatten(tree).items()} for tree in (old, new))
  names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
  return ", ".join(f"{name} {one.get(name)} -> {other.get(name)}" for name in names[:3])


def _kind(leaf: Any) -> str:
  return f"{leaf.dtype}{list(leaf.shape)}"


def _reason(error: Exception) -> str:
  return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def schedule(cfg: OptimizerSection, steps: int) -> Schedule:
  """The schedule of the configuration, whose program is the same for all its numbers.

  Linear warm-up over warmup_steps_fraction of the schedule (step 0 has 1 / warm-up steps of the peak), then cosine,
  constant or wsd. After the schedule's last step the rate stays at its final value.
  """
  total = steps if cfg.learning_rate_schedule_steps == -1 else cfg.learning_rate_schedule_steps
  warmup, kind = round(total * cfg.warmup_steps_fraction), cfg.lr_schedule_type
  peak, final = cfg.learning_rate, cfg.learning_rate * cfg.learning_rate_final_fraction
  decay = max(round(total * cfg.wsd_decay_steps_fraction) if kind == "wsd" else total - warmup, 1)
  change = (peak - final) * 0.5 if kind == "cosine" else final - peak
  # Reciprocals, because XLA divides by a constant in this way: so the bits are those of a program with constants.
  one = np.float32(1)
  values = warmup, one / np.float32(max(warmup, 1)), total - decay, one / np.float32(decay), peak, final, change

  def rate(step: jax.Array, values: jax.Array) -> jax.Array:
    warmup, warmup_rate, start, decay_rate, peak, final, change = values
    step = step.astype(jnp.float32)
    progress = jnp.clip((step - start) * decay_rate, 0.0, 1.0)
    if kind == "constant":
      after = peak
    elif kind == "cosine":
      after = final + change * (1 + jnp.cos(jnp.pi * progress))
    else:
      after = peak + change * progress
    return jnp.where(step < warmup, peak * jnp.minimum((step + 1) * warmup_rate, 1.0), after)

  return Schedule(rate, np.array(values, np.float32))


def rise(cfg: OptimizerSection, steps: int, saved: Mapping[str, Any], step: int) -> str:
  """A warning that a longer schedule raises the learning rate after `step` steps, and how to avoid it; "" if not.

  saved: the keys of the run that did the steps before.
  """
  length = saved.get("learning_rate_schedule_steps", -1)
  length = saved.get("steps", steps) if length == -1 else length
  kept = cfg.model_copy(update={"learning_rate_schedule_steps": length})
  before, after = (float(schedule(each, steps).at(step)) for each in (kept, cfg))
  if after <= before * 1.001:
    return ""
  return (
    f"the learning rate rises from {before:.3g} to {after:.3g} at step {step + 1}, because the schedule of the steps "
    f"before it has {length} steps. Set learning_rate_schedule_steps={length} to continue with {before:.3g}"
  )


def build(cfg: OptimizerSection, logical_axes: Any, weight_dtype: str = "float32") -> optax.GradientTransformation:
  """The optimizer for parameters with these `logical_axes` (a pytree of tuples of names, one name per dim).

  `update` takes clipped float32 gradients and returns the float32 descent step for a learning rate of 1. It includes
  decoupled weight decay, which the learning rate therefore multiplies, as in AdamW. The first moment has mu_dtype, or
  `weight_dtype` if mu_dtype is empty. The rest of the state is float32: bfloat16 would round away the small changes
  of the second moment (1 - adam_b2 of itself, or less).
  """
  return _in_float32(_build(cfg, logical_axes, cfg.mu_dtype or weight_dtype))


def _in_float32(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
  """`optimizer` for weights of any dtype, which it gets as float32 like their gradients."""
  cast = lambda params: jax.tree.map(lambda p: p.astype(jnp.float32), params)

  def update(grads: Any, state: Any, params: Any = None) -> Any:
    with jax.numpy_dtype_promotion("standard"):  # optax has float ** int32; the tests forbid such operations elsewhere
      return optimizer.update(grads, state, cast(params))

  return optax.GradientTransformation(lambda params: optimizer.init(cast(params)), update)


def _build(cfg: OptimizerSection, logical_axes: Any, mu_dtype: str) -> optax.GradientTransformation:
  is_axes = lambda x: isinstance(x, tuple)
  mask = jax.tree.map(_is_matrix, logical_axes, is_leaf=is_axes)
  decay = optax.add_decayed_weights(cfg.adam_weight_decay, mask)
  if cfg.opt_type == "adamw":
    adam = optax.scale_by_adam(b1=cfg.adam_b1, b2=cfg.adam_b2, eps=cfg.adam_eps, mu_dtype=mu_dtype)
    return optax.chain(adam, decay, optax.scale(-1.0))
  if cfg.opt_type == "sgd":
    return optax.chain(optax.trace(decay=cfg.adam_b1, accumulator_dtype=mu_dtype), decay, optax.scale(-1.0))
  if cfg.opt_type == "adafactor":
    # optax.adafactor negates its updates itself, after weight decay.
    rate = cfg.adam_weight_decay or None
    adafactor = optax.adafactor(learning_rate=None, weight_decay_rate=rate, weight_decay_mask=mask)
    return _per_layer(adafactor, logical_axes)
  dims = jax.tree.map(_muon_dims, logical_axes, is_leaf=is_axes)
  muon = contrib.muon(  # its Adam part has Nesterov momentum too
    learning_rate=-1.0,  # undoes the negation in optax.muon: we negate below, after weight decay
    beta=cfg.adam_b1,
    adam_b1=cfg.adam_b1,
    adam_b2=cfg.adam_b2,
    eps=cfg.adam_eps,
    mu_dtype=mu_dtype,
    muon_weight_dimension_numbers=dims,
    # Moonlight's scale: updates have the same root mean square as Adam's, so that one learning rate works for both
    # (Liu et al., "Muon is scalable for LLM training", 2025).
    consistent_rms=0.2,
  )
  # optax.muon cannot mask the decay of its Adam part, in which the head decays and the embedding does not.
  return optax.chain(muon, decay, optax.scale(-1.0))


def _per_layer(optimizer: optax.GradientTransformation, logical_axes: Any) -> optax.GradientTransformation:
  """`optimizer` applied to each layer of a stacked weight separately, so that scan_layers does not change the numbers.

  Adafactor uses the root mean square and the two largest dims of a whole weight. The state has the same arrays; those
  of stacked weights have a leading dim for the layers.
  """
  is_axes = lambda x: isinstance(x, tuple)
  axes = jax.tree.map(lambda names: 0 if names[0] == "layers" else None, logical_axes, is_leaf=is_axes)
  if not jax.tree.leaves(axes):
    return optimizer

  def state_axes(params: Any) -> Any:
    first = lambda axis, leaf: leaf if axis is None else leaf[0]
    take = lambda params: jax.tree.map(first, axes, params, is_leaf=lambda x: x is None)
    state = jax.eval_shape(lambda params: optimizer.init(take(params)), params)
    return optax.tree.map_params(optimizer, lambda _, axis: axis, state, axes, transform_non_params=lambda _: None)

  def init(params: Any) -> Any:
    return jax.vmap(optimizer.init, in_axes=(axes,), out_axes=state_axes(params))(params)

  def update(grads: Any, state: Any, params: Any = None) -> Any:
    states = state_axes(params)
    return jax.vmap(optimizer.update, in_axes=(axes, states, axes), out_axes=(axes, states))(grads, state, params)

  return optax.GradientTransformation(init, update)


def _is_matrix(axes: tuple[str, ...]) -> bool:
  """Whether a weight is a matrix: no scale of a norm, load of experts, or embedding table (also if it is the head)."""
  return not {"table_embed", "norm", "load"} & set(axes)


def _muon_dims(axes: tuple[str, ...]) -> contrib.MuonDimensionNumbers | None:
  """Dims of a projection as a matrix for Muon, with heads and head_dim as one side; None if Adam updates the weight."""
  if not _is_matrix(axes) or "vocab" in axes:  # vocab: an untied head, or the embedding table
    return None
  # Each expert of a layer has a matrix of its own; the router is one matrix, whose columns are the experts.
  of_matrix = [i for i, axis in enumerate(axes) if axis != "layers" and (axis != "experts" or i == len(axes) - 1)]
  reads_residual = axes[of_matrix[0]] == "embed"
  split = of_matrix[:1] if reads_residual else of_matrix[:-1]
  rest = [i for i in of_matrix if i not in split]
  return contrib.MuonDimensionNumbers(reduction_axis=tuple(split), output_axis=tuple(rest))
