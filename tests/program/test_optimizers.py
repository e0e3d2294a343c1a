"""Schedules and optimizers: values compared with optax, which weights decay, which weights Muon orthogonalizes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from trainer.config.schema import OptimizerSection
from trainer.program import optimizers

AXES = {
  "embedding": ("vocab", "table_embed"),
  "layers": {
    "query": ("layers", "embed", "heads", "head_dim"),
    "out": ("layers", "heads", "head_dim", "embed"),
    "norm": {"scale": ("layers", "norm")},
  },
  "lm_head": ("vocab", "head_embed"),
}
SHAPES = {
  "embedding": (12, 8),
  "layers": {"query": (3, 8, 2, 4), "out": (3, 2, 4, 8), "norm": {"scale": (3, 8)}},
  "lm_head": (12, 8),
}
is_tuple = lambda x: isinstance(x, tuple)


def tree(seed: int):
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32), SHAPES, is_leaf=is_tuple)


def one_update(**keys):
  cfg = OptimizerSection(**keys)
  optimizer = optimizers.build(cfg, AXES)
  params, grads = tree(0), tree(1)
  updates, _ = optimizer.update(grads, optimizer.init(params), params)
  return params, grads, updates


def rates(steps: int, at, **keys) -> list[float]:
  schedule = optimizers.schedule(OptimizerSection(**keys), steps)
  return [float(schedule.at(step)) for step in at]


@pytest.mark.parametrize(
  ("keys", "saved", "step", "length"),
  [
    ({}, {"steps": 100}, 100, 100),  # complete, extended
    ({}, {"steps": 100}, 60, 100),  # extended before its end
    ({"lr_schedule_type": "wsd"}, {"steps": 100}, 100, 100),
    ({}, {"steps": 120, "learning_rate_schedule_steps": 100}, 100, 100),
    ({"learning_rate_schedule_steps": 150}, {"steps": 90, "learning_rate_schedule_steps": -1}, 80, 90),
    ({}, {"steps": 100}, 5, None),  # the longer warm-up has the lower rate
    ({}, {"steps": 300}, 100, None),  # shorter
    ({}, {"steps": 200}, 100, None),
    ({"lr_schedule_type": "constant"}, {"steps": 100}, 100, None),
    ({"learning_rate_schedule_steps": 100}, {"steps": 100}, 100, None),
    ({"learning_rate": 0.1}, {"steps": 200, "learning_rate": 0.01}, 100, None),  # on purpose, and logged
  ],
)
def test_a_schedule_that_raises_the_learning_rate_at_a_resume_is_named(keys, saved, step, length):
  cfg = OptimizerSection(**keys)
  text = optimizers.rise(cfg, 200, saved, step)
  assert bool(text) == (length is not None)
  if length:
    kept = {**keys, "learning_rate_schedule_steps": length}
    before, after = rates(200, [step], **kept)[0], rates(200, [step], **keys)[0]
    assert f"rises from {before:.3g} to {after:.3g} at step {step + 1}" in text
    assert f"Set learning_rate_schedule_steps={length} " in text
    assert optimizers.rise(OptimizerSection(**kept), 200, saved, step) == ""


KINDS = ["constant", "cosine", "wsd"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_rate_is_the_final_one_right_after_a_schedule_without_decay_steps(kind):
  """It was the peak for one step more. After a warm-up over all steps there are none, and in wsd if the share is 0."""
  keys = {"lr_schedule_type": kind, "learning_rate": 1.0, "learning_rate_final_fraction": 0.25}
  after = 1.0 if kind == "constant" else 0.25
  assert rates(10, [9, 10, 11], warmup_steps_fraction=1.0, **keys) == [1.0, after, after]
  if kind == "wsd":
    assert rates(10, [8, 9, 10], warmup_steps_fraction=0.5, wsd_decay_steps_fraction=0.0, **keys) == [1.0, 1.0, 0.25]


@pytest.mark.parametrize("kind", KINDS)
def test_the_rate_has_the_bits_of_a_program_with_the_numbers_as_constants(kind):
  """Before, they were constants, and a sweep over learning rates compiled each program."""
  for peak, final, total, warmup in [(3e-4, 0.1, 1000, 0.1), (1e-2, 0.1, 997, 0.037), (7e-3, 0.0, 641, 0.0)]:
    keys = {"learning_rate": peak, "learning_rate_final_fraction": final, "warmup_steps_fraction": warmup}
    section = OptimizerSection(lr_schedule_type=kind, wsd_decay_steps_fraction=0.13, **keys)
    schedule = optimizers.schedule(section, total)
    as_in_runs = {"xla_backend_optimization_level": 3}  # tests have 0, which rounds programs in its own ways
    plain = jax.jit(constants(section, total), compiler_options=as_in_runs)
    given = jax.jit(schedule.rate, compiler_options=as_in_runs)
    for step in [*range(0, total, 7), *range(total - 2, total + 3)]:
      one, other = given(jnp.int32(step), schedule.values), plain(jnp.int32(step))
      assert np.asarray(one).tobytes() == np.asarray(other).tobytes(), (peak, step)


def constants(cfg: OptimizerSection, total: int):
  """The schedule, written with Python numbers."""
  warmup, kind = round(total * cfg.warmup_steps_fraction), cfg.lr_schedule_type
  peak, final = cfg.learning_rate, cfg.learning_rate * cfg.learning_rate_final_fraction
  decay = round(total * cfg.wsd_decay_steps_fraction) if kind == "wsd" else total - warmup

  def rate(step):
    step = step.astype(jnp.float32)
    progress = jnp.clip((step - (total - decay)) / decay, 0.0, 1.0)
    cosine = final + (peak - final) * 0.5 * (1 + jnp.cos(jnp.pi * progress))
    after = {"constant": jnp.float32(peak), "cosine": cosine, "wsd": peak + (final - peak) * progress}[kind]
    return jnp.where(step < warmup, peak * jnp.minimum((step + 1) / max(warmup, 1), 1.0), after)

  return rate


def test_adamw_equals_optax():
  params, grads, updates = one_update(opt_type="adamw", adam_weight_decay=0.1)
  decays = {"embedding": False, "layers": {"query": True, "out": True, "norm": {"scale": False}}, "lm_head": True}
  oracle = optax.adamw(1.0, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, mask=decays)
  with jax.numpy_dtype_promotion("standard"):  # optax has float ** int32
    want, _ = oracle.update(grads, oracle.init(params), params)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), updates, want)


def test_muon_orthogonalizes_each_layer_and_adam_updates_the_rest():
  _, _, updates = one_update(opt_type="muon", adam_weight_decay=0.0)
  for name, shape in (("query", (8, 8)), ("out", (8, 8))):
    for layer in updates["layers"][name]:
      singular = np.linalg.svd(np.asarray(layer).reshape(shape), compute_uv=False)
      assert singular.max() / singular.min() < 3, name  # five Newton-Schulz steps make them similar
  params, grads = tree(0), tree(1)
  oracle = optax.nadamw(1.0, b1=0.9, b2=0.95, weight_decay=0.0)
  with jax.numpy_dtype_promotion("standard"):
    want, _ = oracle.update(grads, oracle.init(params), params)
  for name in ("embedding", "lm_head"):
    np.testing.assert_allclose(updates[name], want[name], rtol=1e-6)


def test_muon_orthogonalizes_each_expert_and_the_router_as_one_matrix():
  """With a vector for each expert, all experts' columns moved alike, and two experts soon took all tokens."""
  axes = {"router": ("layers", "embed", "experts"), "up": ("layers", "experts", "embed", "mlp")}
  rng = np.random.default_rng(0)
  arrays = [{"router": rng.normal(size=(2, 8, 4)) + 3.0, "up": rng.normal(size=(2, 4, 8, 6)) + 3.0} for _ in range(2)]
  params, grads = (jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree) for tree in arrays)
  optimizer = optimizers.build(OptimizerSection(opt_type="muon", adam_weight_decay=0.0), axes)
  updates, _ = optimizer.update(grads, optimizer.init(params), params)
  for matrix in [*updates["router"], *updates["up"].reshape(8, 8, 6)]:
    singular = np.linalg.svd(np.asarray(matrix), compute_uv=False)
    assert singular.max() / singular.min() < 3


@pytest.mark.parametrize("opt_type", ["adamw", "adafactor", "muon", "sgd"])
def test_stacked_layers_are_updated_like_separate_layers(opt_type):
  """With gradients of different scales per layer, and sizes at which adafactor factors the second moment."""
  rng = np.random.default_rng(0)
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  stacked = {"embedding": AXES["embedding"], "layers": AXES["layers"]}
  params = {
    "embedding": normal(130, 128),
    "layers": {"query": normal(2, 128, 2, 128), "out": normal(2, 2, 128, 128), "norm": {"scale": normal(2, 128)}},
  }
  by_layer = lambda x: x * jnp.array([1e-3, 30.0]).reshape(2, *[1] * (x.ndim - 1))
  grads = {
    "embedding": normal(130, 128),
    "layers": jax.tree.map(lambda x: by_layer(normal(*x.shape)), params["layers"]),
  }

  def apart(tree):
    layers = {str(i): jax.tree.map(lambda x, i=i: x[i], tree["layers"]) for i in range(2)}
    return {"embedding": tree["embedding"], "layers": layers}

  layer = jax.tree.map(lambda names: names[1:], AXES["layers"], is_leaf=is_tuple)
  one = optimizers.build(OptimizerSection(opt_type=opt_type), stacked)
  other = optimizers.build(
    OptimizerSection(opt_type=opt_type), {"embedding": AXES["embedding"], "layers": {str(i): layer for i in range(2)}}
  )
  state, state_apart = one.init(params), other.init(apart(params))
  for _ in range(3):
    updates, state = jax.jit(one.update)(grads, state, params)
    want, state_apart = jax.jit(other.update)(apart(grads), state_apart, apart(params))
    # Not bit-identical: batched matmuls of Muon sum in another order.
    close = lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * np.abs(y).max())
    jax.tree.map(close, apart(updates), want)
